"""The contenders of the training step: a process for each, asked in an order that alternates.

A process builds its contender, takes a first step, and then does what it is told: take steps, say
what memory they took, break a step into parts. All get the same number of tokens, random ones of
the same vocabulary, so that no embedding row is warmer than it would be in training.
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
from bench.timing import quantiles
from bench.trainers import nanogpt_step, plain_step
from fastgpt import device
from fastgpt.config import Config, ModelConfig, OpsConfig
from fastgpt.engine import Engine
from fastgpt.errors import UserError

WARM_STEPS, TIMED_STEPS = 2, 3
"""Steps of each turn."""
TINY: dict[str, Any] = {"num_layers": 1, "num_heads": 1, "dim": 16, "context": 8}
"""The network of a rehearsal: Triton's interpreter takes seconds for a step of more."""
PATIENCE = 5
"""First steps that are tried where memory is short."""
START_S = 600
"""Seconds that a process may take to build and compile."""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
OUT_OF_MEMORY = "out of memory"
SIZES = (
    "num_layers", "num_heads", "dim", "context", "vocab_size", "vocab_multiple", "bias", "dropout",
    "init",
)  # fmt: skip
"""Settings in which the peers' GPT-2 may differ from the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The step that all contenders take; picklable."""

    config: Config
    on: str
    precision: str
    nanogpt: Path | None = None

    @property
    def tokens(self) -> int:
        return self.config.train.batch_tokens


def write_text(path: Path, vocab: int, tokens: int) -> None:
    """`tokens` random characters out of `vocab` different ones, all of which occur.

    Letters of Chinese, so that 50,257 are found that no tokenizer of characters treats apart.
    """
    letters = [chr(i) for i in (*range(0x4E00, 0x9F00), *range(0x20000, 0x2A600))][:vocab]
    drawn = np.random.default_rng(0).integers(vocab, size=max(tokens - vocab, 0))
    path.write_text("".join(letters) + "".join(letters[i] for i in drawn), encoding="utf-8")


# --- the contenders: a plan -> (a step, what the record says of it) -------------------------------

Built = tuple[Callable[[], None], dict[str, Any]]


def _random_batches(plan: Plan) -> Callable[[], tuple[Tensor, Tensor]]:
    vocab = plan.config.model.vocab_size
    assert vocab is not None
    shape = (2, plan.config.global_batch, plan.config.model.context)
    x, y = torch.randint(vocab, shape, device=plan.on)
    return lambda: (x, y)


def expect_gpt2(model: ModelConfig) -> None:
    """Raises `UserError` for a network that the peers do not have: theirs would be other work."""
    plain = ModelConfig(**{name: getattr(model, name) for name in SIZES})
    names = (field.name for field in fields(model))
    if others := [name for name in names if getattr(model, name) != getattr(plain, name)]:
        raise UserError(f"the network is not GPT-2's in {', '.join(others)}: it has no such one")


def _fastgpt(plan: Plan, ops: OpsConfig) -> Built:
    config = replace(plan.config, ops=ops)
    engine = Engine(config, warn=lambda _: None)
    if engine.loader.accumulation > 1:
        raise UserError(
            f"{config.global_batch} sequences are taken in micro-steps of {engine.micro_batch}"
        )

    def step() -> None:
        engine.train_step()

    step.waited = lambda: engine.loader.waited_s  # pyright: ignore
    return step, {
        "ops": engine.ops.names,
        "trials": engine.trials,
        "compile": engine.compiled,
        "optimizer": config.optim.kind,
    }


def _every_op(*wanted: str) -> OpsConfig:
    """Each op by the first of these names that it can have, else as it is by default."""
    kinds = {field.name: get_args(field.type) for field in fields(OpsConfig)}
    names: dict[str, Any] = {
        op: next(name for name in (*wanted, "auto") if name in kind) for op, kind in kinds.items()
    }
    return OpsConfig(**names)


TRITON_OPS = _every_op("triton", "chunked")
"""Every op that has kernels of ours, by them."""
PLAIN_OPS = _every_op("torch")
"""Every op as PyTorch's own operations."""


def _reference(plan: Plan, *, compiled: bool) -> Built:
    expect_gpt2(plan.config.model)
    batches = _random_batches(plan)
    step = plain_step(plan.config, plan.on, plan.precision, batches, compiled=compiled)
    return step, {"compile": compiled, "optimizer": "adamw"}


def _nanogpt(plan: Plan, precision: str) -> Built:
    assert plan.nanogpt is not None
    expect_gpt2(plan.config.model)
    batches = _random_batches(plan)
    step = nanogpt_step(plan.config, plan.nanogpt, plan.on, precision, batches)
    return step, {"compile": plan.on == "cuda", "optimizer": "adamw", "precision": precision}


CONTENDERS: dict[str, Callable[[Plan], Built]] = {
    "fastgpt": lambda plan: _fastgpt(plan, plan.config.ops),
    "fastgpt triton": lambda plan: _fastgpt(plan, TRITON_OPS),
    "eager": lambda plan: _reference(plan, compiled=False),
    "compiled": lambda plan: _reference(plan, compiled=True),
    "nanogpt": lambda plan: _nanogpt(plan, plan.precision),
    "nanogpt fp32": lambda plan: _nanogpt(plan, "fp32"),
}


# --- in the contender's process -------------------------------------------------------------------


def _synchronize(on: str) -> None:
    if on == "cuda":
        torch.cuda.synchronize()


def _first_step(step: Callable[[], None], on: str) -> None:
    """Takes it; where others that start as well have the memory for now, once more a bit later."""
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
    """Seconds of each step at a steady pace, until the device is done; those of the host alone."""
    device_s, host_s = [], []
    for _ in range(WARM_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - start)
        _synchronize(on)
        device_s.append(time.perf_counter() - start)
    if on == "cuda":
        torch.cuda.empty_cache()  # the next one's turn: only weights and moments stay
    return {"device_s": device_s[WARM_STEPS:], "host_s": host_s[WARM_STEPS:]}


def _peak(on: str) -> int | None:
    if on == "cuda":
        return torch.cuda.max_memory_allocated()
    return resident_peak() if Path("/proc/self/status").exists() else None


def serve(pipe: Connection, name: str, plan: Plan) -> None:
    """Builds the contender and answers until it is told to stop."""
    if plan.on == "cpu" and not name.startswith("nanogpt"):
        device.keep_freed_memory()
    try:
        torch.manual_seed(0)
        start = time.perf_counter()
        step, facts = CONTENDERS[name](plan)
        _first_step(step, plan.on)
        first = time.perf_counter() - start
        if plan.on == "cuda":
            torch.cuda.empty_cache()
        pipe.send({**facts, "first_step_s": first})
        while word := pipe.recv():
            if word == "turn":
                pipe.send(_turn(step, plan.on))
            elif word == "peak":
                pipe.send({"peak_bytes": _peak(plan.on)})
            else:
                pipe.send({"parts": parts.profile(step, plan.on)})
    except torch.OutOfMemoryError:
        pipe.send({"failed": OUT_OF_MEMORY})
    except UserError as error:
        pipe.send({"failed": str(error)})
    except Exception as error:
        traceback.print_exc()
        pipe.send({"failed": in_one_line(error)})


# --- taking turns ---------------------------------------------------------------------------------


class Contender:
    """A process with a contender in it; `failed` says why it cannot go on, if it cannot.

    Args:
        name: a key of CONTENDERS.
        plan: what it does.
        caches: folder of what torch.compile and Triton keep; an empty one makes a cold start.
    """

    def __init__(self, name: str, plan: Plan, caches: Path) -> None:
        self.name, self.plan, self.failed = name, plan, ""
        self.caches = {key: str(caches / folder) for key, folder in CACHES.items()}
        self.facts: dict[str, Any] = {}
        self.seconds: dict[str, list[float]] = {"device_s": [], "host_s": []}
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, there = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(there, self.name, self.plan), daemon=True)
        with mock.patch.dict(os.environ, self.caches):
            self.process.start()
        there.close()  # so that a process that ends is seen to have ended

    def ask(self, word: str = "") -> dict[str, Any]:
        """The answer to `turn`, `peak` or `parts`; to nothing, what it says after its first step.

        It is empty where the contender has failed, now or before.
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
            answer = {"failed": "its process ended early: too little memory, perhaps"}
        self.failed = answer.get("failed", "")
        return {} if self.failed else answer

    def begin(self, starts: int = 1) -> None:
        """Waits for its first step; of two starts the second finds the caches filled."""
        self.facts = self.ask()
        if starts == 2 and not self.failed:
            self.stop()
            self._start()
            cold, warm = self.facts["first_step_s"], self.ask()
            self.facts = warm and {
                **warm, "first_step_s": cold, "first_step_warm_s": warm["first_step_s"]
            }  # fmt: skip
        if self.failed:
            self.stop()  # others may need its memory

    def turn(self, *, counts: bool) -> None:
        took = self.ask("turn")
        for clock, seconds in self.seconds.items():
            seconds += took.get(clock, []) if counts else []

    def figures(self) -> dict[str, Any]:
        """Figures of the contender, or why it has none; they are kept if its parts fail."""
        peak = self.ask("peak")
        if self.failed:
            return {"reason": self.failed}
        device_s, host_s = self.seconds.values()
        return {
            **self.facts, **peak, **(self.ask("parts") or {"no_parts": self.failed}),
            "seconds": quantiles(device_s), "host_s": quantiles(host_s), "all_seconds": device_s,
        }  # fmt: skip

    def stop(self) -> None:
        """Ends the process, gently first."""
        with suppress(OSError):
            self.pipe.send("")
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def take_turns(
    names: tuple[str, ...],
    plan: Plan,
    caches: Path,
    *,
    rounds: int,
    starts: int = 1,
    parallel_start: bool = False,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, figures) of each contender, or (name, {"reason": why it has none}).

    Args:
        names: keys of CONTENDERS.
        plan: what all of them do.
        caches: a folder for what they compile.
        rounds: that count, after one that does not.
        starts: 2 starts each of them a second time, with its caches filled.
        parallel_start: start all at once.
    """
    contenders: list[Contender] = []
    try:
        for name in names:
            folder = caches / name.replace(" ", "-") / str(plan.config.global_batch)
            contenders.append(Contender(name, plan, folder))
            if not parallel_start:
                contenders[-1].begin(starts)
        for contender in contenders if parallel_start else ():
            contender.begin()
        for turn in range(rounds + 1):
            for contender in contenders[:: 1 if turn % 2 else -1]:
                contender.turn(counts=turn > 0)
        for contender in contenders:
            yield contender.name, contender.figures()
    finally:
        for contender in contenders:
            contender.stop()
