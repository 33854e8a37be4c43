"""A training step beside nanoGPT's, in turn: `python -m bench.step --nanogpt PATH`.

Both do what their own train.py does between two log lines: forward, backward, clipping, AdamW
(fastgpt also takes its next batch; nanoGPT gets one random batch each time). nanoGPT runs its own
model.py as it is, in a process of its own, in fp32 and in the precision that fastgpt takes. The
order alternates, so that a machine whose speed drifts hurts both.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from bench import nanogpt, records
from fastgpt import device
from fastgpt.config import Config
from fastgpt.engine import Engine
from fastgpt.errors import UserError, shown_in_one_line, unknown_name
from fastgpt.recipes import RECIPES

WARM_STEPS, TIMED_STEPS = 2, 3
"""Of each turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBench:
    """Times training steps of fastgpt and nanoGPT in alternating rounds."""

    recipe: Annotated[str, tyro.conf.Positional] = "shakespeare-char"
    """Whose network, batch and data."""
    nanogpt: Path
    """A checkout of nanoGPT; its model.py is imported."""
    dropout: float | None = None
    """For both; None: the recipe's."""
    batch: int | None = None
    """Sequences of a step, for both; None: the recipe's."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of fastgpt's model; nanoGPT's is compiled on CUDA."""
    rounds: int = 7
    """Rounds that count, after one that does not; in each, every implementation has a turn."""


def nanogpt_step(
    config: Config, checkout: Path, on: str, autocast: AbstractContextManager
) -> Callable[[], None]:
    """A training step of nanoGPT's model with `config`'s sizes, optimizer settings and dropout."""
    module = nanogpt.load_model_module(checkout)
    sizes = config.model
    model = module.GPT(
        module.GPTConfig(
            block_size=sizes.context,
            vocab_size=sizes.vocab_size,
            n_layer=sizes.num_layers,
            n_head=sizes.num_heads,
            n_embd=sizes.dim,
            dropout=sizes.dropout,
            bias=sizes.bias,
        )
    ).to(on)
    optim = config.optim
    adamw = model.configure_optimizers(optim.weight_decay, optim.lr, (optim.beta1, optim.beta2), on)
    forward = torch.compile(model) if on == "cuda" else model
    assert sizes.vocab_size is not None
    shape = (2, config.global_batch, sizes.context)
    x, y = torch.randint(sizes.vocab_size, shape, device=on)

    def step() -> None:
        with autocast:
            _, loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def serve_nanogpt(pipe: Connection, config: Config, checkout: Path, on: str, dtype: str) -> None:
    """In a process of its own, so that nothing of fastgpt's is set there: a step for each word."""
    step = nanogpt_step(config, checkout, on, device.autocast(on, dtype))
    while pipe.recv():
        pipe.send(timed(step, on))


def timed(step: Callable[[], None], on: str) -> float:
    """Seconds of a step at its steady pace: the median of three, after two that are not counted."""
    seconds = []
    for _ in range(WARM_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        step()
        if on == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_STEPS:])


def ask(pipe: Connection) -> float:
    """One turn of a nanoGPT process.

    Raises:
        UserError: it has ended; what it said is above.
    """
    try:
        pipe.send(True)
        return pipe.recv()
    except (EOFError, BrokenPipeError) as error:
        raise UserError("a nanoGPT process ended early: too little memory, perhaps") from error


def engine_for(bench: StepBench) -> Engine:
    """The recipe's engine, with the sizes that were asked for."""
    if bench.recipe not in RECIPES:
        raise unknown_name("recipe", bench.recipe, RECIPES)
    config = RECIPES[bench.recipe][1]
    model, train = config.model, replace(config.train, compile=bench.compile)
    if bench.dropout is not None:
        model = replace(model, dropout=bench.dropout)
    if bench.batch is not None:
        train = replace(train, batch_tokens=bench.batch * model.context, micro_batch=bench.batch)
    engine = Engine(replace(config, model=model, train=train))
    if engine.loader.accumulation > 1:
        raise UserError(
            f"{bench.recipe} takes {config.global_batch} sequences in micro-steps of "
            f"{engine.micro_batch}: pass --batch {engine.micro_batch} or less to compare one step"
        )
    return engine


def measure(bench: StepBench) -> list[dict[str, Any]]:
    """A row for each implementation: tokens/s, and seconds per step as quantiles."""
    if bench.rounds < 2:
        raise UserError(f"--rounds is {bench.rounds}: expected 2 or more")
    nanogpt.load_model_module(bench.nanogpt)  # a wrong path is an error before anything runs
    engine = engine_for(bench)
    on, config = engine.device, engine.config
    ours = f"fastgpt {engine.precision}"
    steps: dict[str, Callable[[], float]] = {ours: lambda: timed(engine.train_step, on)}
    spawn = multiprocessing.get_context("spawn")
    workers = []
    for dtype in dict.fromkeys(("fp32", engine.precision)):
        here, there = spawn.Pipe()
        arguments = (there, config, bench.nanogpt, on, dtype)
        workers.append((spawn.Process(target=serve_nanogpt, args=arguments, daemon=True), here))
        workers[-1][0].start()
        there.close()  # so that a process that ends is seen to have ended
        steps[f"nanogpt {dtype}"] = partial(ask, here)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(bench.rounds + 1):
        for name, step in list(steps.items())[:: 1 if turn % 2 else -1]:
            took = step()
            if turn:
                seconds[name].append(took)
    for process, pipe in workers:
        pipe.send(False)
        process.join()
    tokens = config.train.batch_tokens
    common = {
        "recipe": bench.recipe,
        "shape": {"B": config.global_batch, "T": config.model.context},
        "dropout": config.model.dropout,
        "compile": engine.compiled,
    }
    return [
        {
            "implementation": name,
            **common,
            "seconds": records.quantiles(times),
            "tok_per_s": tokens / records.quantiles(times)["p50"],
            # the ratio of each round, so that a slow spell counts for both
            "fastgpt_speedup": records.quantiles(
                [b / a for a, b in zip(seconds[ours], times, strict=True)]
            ),
        }
        for name, times in seconds.items()
    ]


def main(argv: list[str]) -> None:
    bench = tyro.cli(StepBench, prog="python -m bench.step", args=argv)
    rows = measure(bench)
    table = Table("implementation", "tok/s", "ms per step (p20 p50 p80)", "fastgpt is faster by")
    for row in rows:
        times = row["seconds"]
        table.add_row(
            row["implementation"],
            f"{row['tok_per_s']:,.0f}",
            " ".join(f"{times[p] * 1e3:.1f}" for p in ("p20", "p50", "p80")),
            f"{row['fastgpt_speedup']['p50']:.2f}x",
        )
    Console().print(table)
    print(records.write("step", device.pick_device("auto"), rows))


if __name__ == "__main__":
    with shown_in_one_line():
        main(sys.argv[1:])
