"""Runs the trainers that the step benchmark compares, each in a process of its own, in turns.

A process builds its implementation, takes a first step, and then follows commands: take steps,
report its memory, break a step into parts. All get the same number of random tokens of the same
vocabulary, so that no embedding row is warmer than it would be in training.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench import parts
from bench.measure import in_one_line, resident_peak
from bench.records import slug
from bench.timing import quantiles
from bench.trainers import GELUS, nanochat_step, nanogpt_step, plain_step
from fastgpt.config.config import Config, OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.device import cpu
from fastgpt.errors import UserError
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train

WARM_STEPS, TIMED_STEPS = 2, 3
"""Number of steps in each turn: untimed, then timed."""
TINY: dict[str, Any] = {"num_layers": 1, "num_heads": 1, "dim": 16, "context": 8}
"""Model sizes of a trial run: Triton's interpreter takes seconds for a larger model's step."""
PATIENCE = 5
"""Number of attempts at the first step if other implementations leave too little GPU memory."""
START_S = 600
"""Seconds that a process may take to build and compile."""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
SIZES = (
    "num_layers", "num_heads", "dim", "context", "vocab_size", "vocab_multiple", "bias", "dropout",
    "init",
)  # fmt: skip
"""Model settings that nanoGPT's and llm.c's GPT-2 also have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """Settings of the step that all implementations run; picklable, to be sent to processes."""

    config: Config
    on: str
    precision: str
    nanogpt: Path | None = None
    nanochat: Path | None = None
    traces: Path | None = None
    """Folder for a Chrome trace of each of fastgpt's steps."""

    @property
    def tokens(self) -> int:
        return self.config.train.batch_tokens

    def with_wide_residual(self) -> "Benchmark":
        train = replace(self.config.train, residual="fp32")
        return replace(self, config=replace(self.config, train=train))

    def in_fp32(self) -> "Benchmark":
        train = replace(self.config.train, precision="fp32")
        return replace(self, precision="fp32", config=replace(self.config, train=train))


def write_text(path: Path, vocab: int, tokens: int) -> None:
    """Writes `tokens` random characters, `vocab` different ones; each occurs.

    The characters are Chinese, so that there are 50,257 that a character tokenizer keeps apart.
    """
    letters = [chr(i) for i in (*range(0x4E00, 0x9F00), *range(0x20000, 0x2A600))][:vocab]
    drawn = np.random.default_rng(0).integers(vocab, size=max(tokens - vocab, 0))
    path.write_text("".join(letters) + "".join(letters[i] for i in drawn), encoding="utf-8")


# --- the implementations: a benchmark -> (a step, facts for the record) ---------------------------

Built = tuple[Callable[[], None], dict[str, Any]]


def _random_batches(benchmark: Benchmark) -> Callable[[], tuple[Tensor, Tensor]]:
    vocab = benchmark.config.model.vocab_size
    assert vocab is not None
    shape = (2, benchmark.config.global_batch, benchmark.config.model.context)
    x, y = torch.randint(vocab, shape, device=benchmark.on)
    return lambda: (x, y)


def expect_gpt2(model: ModelConfig) -> None:
    """Raises `UserError` for a network that differs from GPT-2's in more than sizes and GELU."""
    plain = ModelConfig(**{name: getattr(model, name) for name in SIZES})
    if model.activation in GELUS:
        plain = replace(plain, activation=model.activation)
    names = (field.name for field in fields(model))
    if others := [name for name in names if getattr(model, name) != getattr(plain, name)]:
        raise UserError(f"the network differs from GPT-2's in {', '.join(others)}")


def _fastgpt(benchmark: Benchmark, ops: OpsConfig) -> Built:
    config = replace(benchmark.config, ops=ops)
    # not probed, which beside the first steps of others would halve the batch
    run = build(resolve(config, warn=lambda _: None), lambda _: None, probe=False)

    def step() -> None:
        train(run, run.step + 1)

    step.waited = lambda: run.loader.waited_s  # pyright: ignore
    return step, {
        "ops": run.model.ops.names,
        "trials": run.plan.trials,
        "compile": run.plan.compiled,
        "optimizer": config.optim.kind,
        "precision": benchmark.precision,
    }


def _every_op(*preferred: str) -> OpsConfig:
    """Builds options that give each op the first of these names that it accepts."""
    kinds = {field.name: get_args(field.type) for field in fields(OpsConfig)}
    names: dict[str, Any] = {
        op: next(name for name in (*preferred, "auto") if name in kind)
        for op, kind in kinds.items()
    }
    return OpsConfig(**names)


TRITON_OPS = _every_op("triton", "chunked")
"""Options that select our Triton kernel for every op that has one."""
PLAIN_OPS = _every_op("torch")
"""Options that select PyTorch's own implementation of every op."""


def _reference(benchmark: Benchmark, *, compiled: bool) -> Built:
    expect_gpt2(benchmark.config.model)
    batches = _random_batches(benchmark)
    step = plain_step(
        benchmark.config, benchmark.on, benchmark.precision, batches, compiled=compiled
    )
    return step, {"compile": compiled, "optimizer": "adamw", "precision": benchmark.precision}


def _nanogpt(benchmark: Benchmark) -> Built:
    assert benchmark.nanogpt is not None
    expect_gpt2(benchmark.config.model)
    batches = _random_batches(benchmark)
    step = nanogpt_step(
        benchmark.config, benchmark.nanogpt, benchmark.on, benchmark.precision, batches
    )
    return step, {
        "compile": benchmark.on == "cuda",
        "optimizer": "adamw",
        "precision": benchmark.precision,
    }


def _nanochat(benchmark: Benchmark) -> Built:
    assert benchmark.nanochat is not None
    batches = _random_batches(benchmark)
    step = nanochat_step(benchmark.config, benchmark.nanochat, benchmark.on, batches)
    return step, {"compile": True, "optimizer": "adamw", "precision": benchmark.precision}


IMPLEMENTATIONS: dict[str, Callable[[Benchmark], Built]] = {
    "fastgpt": lambda benchmark: _fastgpt(benchmark, benchmark.config.ops),
    "fastgpt fp32": lambda benchmark: _fastgpt(benchmark.in_fp32(), benchmark.config.ops),
    "fastgpt triton": lambda benchmark: _fastgpt(benchmark, TRITON_OPS),
    "fastgpt triton, fp32 residual": lambda benchmark: _fastgpt(
        benchmark.with_wide_residual(), TRITON_OPS
    ),
    "eager": lambda benchmark: _reference(benchmark, compiled=False),
    "compiled": lambda benchmark: _reference(benchmark, compiled=True),
    "nanogpt": _nanogpt,
    "nanochat": _nanochat,
    "nanogpt fp32": lambda benchmark: _nanogpt(benchmark.in_fp32()),
}


# --- in the implementation's process --------------------------------------------------------------


def _synchronize(on: str) -> None:
    if on == "cuda":
        torch.cuda.synchronize()


def _first_step(step: Callable[[], None], on: str) -> None:
    """Takes the first step; retries while other implementations that start fill the memory."""
    for attempt in range(PATIENCE):
        try:
            step()
            _synchronize(on)
            return
        except torch.OutOfMemoryError:
            if attempt == PATIENCE - 1:
                raise
        torch.cuda.empty_cache()
        time.sleep(3)


def _turn(step: Callable[[], None], on: str) -> dict[str, Any]:
    """Times a few training steps: seconds until the device is done, and seconds of the host."""
    device_s, host_s = [], []
    for _ in range(WARM_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - start)
        _synchronize(on)
        device_s.append(time.perf_counter() - start)
    if on == "cuda":
        torch.cuda.empty_cache()  # for the next implementation's turn; weights and moments stay
    return {"device_s": device_s[WARM_STEPS:], "host_s": host_s[WARM_STEPS:]}


def _peak(on: str) -> int | None:
    if on == "cuda":
        return torch.cuda.max_memory_allocated()
    return resident_peak() if Path("/proc/self/status").exists() else None


def _trace(name: str, benchmark: Benchmark) -> Path | None:
    if benchmark.traces is None or not name.startswith("fastgpt"):
        return None
    return benchmark.traces / f"{slug(name)}-{benchmark.config.global_batch}.trace.json.gz"


def serve(pipe: Connection, name: str, benchmark: Benchmark) -> None:
    """Builds the implementation and answers commands until it is told to stop."""
    if benchmark.on == "cpu" and not name.startswith("nanogpt"):
        cpu.keep_freed_memory()
    try:
        torch.manual_seed(0)
        start = time.perf_counter()
        step, facts = IMPLEMENTATIONS[name](benchmark)
        _first_step(step, benchmark.on)
        first = time.perf_counter() - start
        if benchmark.on == "cuda":
            torch.cuda.empty_cache()
        pipe.send({**facts, "first_step_s": first})
        while word := pipe.recv():
            if word == "turn":
                pipe.send(_turn(step, benchmark.on))
            elif word == "peak":
                pipe.send({"peak_bytes": _peak(benchmark.on)})
            else:
                pipe.send(parts.profile(step, benchmark.on, _trace(name, benchmark)))
    except torch.OutOfMemoryError:
        pipe.send({"failed": "out of memory"})
    except UserError as error:
        pipe.send({"failed": str(error)})
    except Exception as error:
        traceback.print_exc()
        pipe.send({"failed": in_one_line(error)})


# --- taking turns ---------------------------------------------------------------------------------


class Implementation:
    """A process that runs one implementation; `failed` is the reason why it cannot go on, or empty.

    Args:
        name: a key of IMPLEMENTATIONS.
        caches: folder for the caches of torch.compile and Triton; an empty one makes a cold start.
    """

    def __init__(self, name: str, benchmark: Benchmark, caches: Path) -> None:
        self.name, self.benchmark, self.failed = name, benchmark, ""
        self.caches = {key: str(caches / folder) for key, folder in CACHES.items()}
        self.facts: dict[str, Any] = {}
        self.seconds: dict[str, list[float]] = {"device_s": [], "host_s": []}
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, there = spawn.Pipe()
        self.process = spawn.Process(
            target=serve, args=(there, self.name, self.benchmark), daemon=True
        )
        with mock.patch.dict(os.environ, self.caches):
            self.process.start()
        there.close()  # then recv raises when the process ends

    def ask(self, word: str = "") -> dict[str, Any]:
        """Sends a request (`turn`, `peak` or `parts`) to the process and returns its answer.

        Without a request it returns the report of the first step.

        The answer is empty if the implementation has failed, now or before.
        """
        if self.failed:
            return {}
        answer = {"failed": f"no answer in {START_S} s"}
        try:
            if word:
                self.pipe.send(word)
            if self.pipe.poll(START_S):
                answer = self.pipe.recv()
        except (EOFError, OSError):
            answer = {"failed": "its process ended early, perhaps for lack of memory"}
        self.failed = answer.get("failed", "")
        return {} if self.failed else answer

    def begin(self, starts: int = 1) -> None:
        """Waits until the process has taken its first step; `starts=2` repeats it with caches."""
        self.facts = self.ask()
        if starts == 2 and not self.failed:
            self.stop()
            self._start()
            cold, warm = self.facts["first_step_s"], self.ask()
            self.facts = warm and {
                **warm, "first_step_s": cold, "first_step_warm_s": warm["first_step_s"]
            }  # fmt: skip
        if self.failed:
            self.stop()  # frees its memory

    def turn(self, *, counts: bool) -> None:
        took = self.ask("turn")
        for clock, seconds in self.seconds.items():
            seconds += took.get(clock, []) if counts else []

    def figures(self) -> dict[str, Any]:
        """Returns the implementation's figures, or why it has none.

        If only the breakdown into parts fails, the other figures are kept.
        """
        peak = self.ask("peak")
        if self.failed:
            return {"reason": self.failed}
        device_s, host_s = self.seconds.values()
        return {
            **self.facts, **peak, **(self.ask("parts") or {"no_parts": self.failed}),
            "seconds": quantiles(device_s), "host_s": quantiles(host_s), "all_seconds": device_s,
        }  # fmt: skip

    def stop(self) -> None:
        """Ends the process; terminates it if it does not stop by itself."""
        with suppress(OSError):
            self.pipe.send("")
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def run_interleaved(
    names: tuple[str, ...],
    benchmark: Benchmark,
    caches: Path,
    *,
    rounds: int,
    starts: int = 1,
    parallel_start: bool = False,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, figures) of each implementation, or (name, {"reason": why it has none}).

    Args:
        names: keys of IMPLEMENTATIONS.
        caches: folder for the code that they compile.
        rounds: number of timed rounds, after one that is not timed.
        starts: 2 starts each implementation a second time, with its caches filled.
        parallel_start: start all implementations at once.
    """
    implementations: list[Implementation] = []
    try:
        for name in names:
            folder = caches / name.replace(" ", "-") / str(benchmark.config.global_batch)
            implementations.append(Implementation(name, benchmark, folder))
            if not parallel_start:
                implementations[-1].begin(starts)
        for implementation in implementations if parallel_start else ():
            implementation.begin()
        for turn in range(rounds + 1):
            for implementation in implementations[:: 1 if turn % 2 else -1]:
                implementation.turn(counts=turn > 0)
        for implementation in implementations:
            yield implementation.name, implementation.figures()
    finally:
        for implementation in implementations:
            implementation.stop()
