"""Contenders taking turns: a process for each, asked in an order that alternates."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import Plan, serve
from bench.timing import quantiles

START_S = 600
"""How long a process may take to build and compile."""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class FailedError(Exception):
    """A contender that cannot go on, and why."""


class Contender:
    """A process with a contender in it.

    Args:
        name: of CONTENDERS.
        plan: what it does.
        caches: folder of what torch.compile and Triton keep; an empty one makes a cold start.
    """

    def __init__(self, name: str, plan: Plan, caches: Path) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")
        self.pipe, there = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(there, name, plan), daemon=True)
        kept = {key: os.environ.get(key) for key in CACHES}
        os.environ.update({key: str(caches / folder) for key, folder in CACHES.items()})
        self.process.start()
        for key, value in kept.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
        there.close()  # so that a process that ends is seen to have ended

    def ready(self) -> dict[str, Any]:
        """What it says when its first step is done."""
        return self._answer(START_S)

    def ask(self, word: str) -> dict[str, Any]:
        """`turn`, `peak` or `parts`.

        Raises:
            FailedError: it has ended, or says why it cannot.
        """
        try:
            self.pipe.send(word)
        except (BrokenPipeError, OSError) as error:
            raise FailedError("its process ended early: too little memory, perhaps") from error
        return self._answer(START_S)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            if not self.pipe.poll(seconds):
                raise FailedError(f"no answer in {seconds:.0f} s")
            answer = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise FailedError("its process ended early: too little memory, perhaps") from error
        if "failed" in answer:
            raise FailedError(answer["failed"])
        return answer

    def stop(self) -> None:
        """Ends the process, gently first."""
        with suppress(OSError):
            self.pipe.send("")
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def _parts(contender: Contender) -> dict[str, Any]:
    """Its parts; its times stand where the profiler, or the memory that it takes, fails."""
    try:
        return contender.ask("parts")
    except FailedError as error:
        return {"no_parts": str(error)}


@dataclass(slots=True)
class Arena:
    """The contenders of one batch size, and what they have shown so far."""

    plan: Plan
    caches: Path
    rounds: int
    starts: int = 1
    parallel_start: bool = False
    alone: bool = False
    """One at a time: where a batch takes all of a GPU's memory."""

    def run(self, names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, figures), or (name, {"reason": why it has none})."""
        for group in [(name,) for name in names] if self.alone else [names]:
            yield from self._group(group)

    def _group(self, names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
        running: dict[str, Contender] = {}
        facts: dict[str, dict[str, Any]] = {}
        failed: dict[str, str] = {}
        try:
            if self.parallel_start:
                running = {name: self._start(name) for name in names}
            for name in names:
                try:
                    facts[name] = self._ready(name, running)
                except FailedError as error:
                    failed[name] = str(error)
                    running.pop(name).stop()
            turns = self._turns(running, failed)
            for name, contender in running.items():
                if name not in failed:
                    try:
                        facts[name] |= contender.ask("peak") | _parts(contender)
                        yield name, {**facts[name], **turns[name], "alternating": not self.alone}
                    except FailedError as error:
                        failed[name] = str(error)
        finally:
            for contender in running.values():
                contender.stop()
        for name, reason in failed.items():
            yield name, {"reason": reason}

    def _start(self, name: str) -> Contender:
        folder = self.caches / name.replace(" ", "-") / str(self.plan.config.global_batch)
        return Contender(name, self.plan, folder)

    def _ready(self, name: str, running: dict[str, Contender]) -> dict[str, Any]:
        """What it said when it was ready, with the seconds to the first step of each start."""
        seconds: list[float] = []
        said: dict[str, Any] = {}
        for start in range(1 if self.parallel_start else self.starts):
            if start:
                running[name].stop()
            if start or name not in running:
                running[name] = self._start(name)
            said = running[name].ready()
            seconds.append(said["first_step_s"])
        warm = {"first_step_warm_s": seconds[1]} if len(seconds) > 1 else {}
        alone = {"first_step_alone": not self.parallel_start}
        return {**said, "first_step_s": seconds[0], **warm, **alone}

    def _turns(
        self, running: dict[str, Contender], failed: dict[str, str]
    ) -> dict[str, dict[str, Any]]:
        seconds: dict[str, dict[str, list[float]]] = {}
        for turn in range(self.rounds + 1):
            for name in list(running)[:: 1 if turn % 2 else -1]:
                if name in failed:
                    continue
                try:
                    took = running[name].ask("turn")
                except FailedError as error:
                    failed[name] = str(error)
                    continue
                if turn:
                    kept = seconds.setdefault(name, {"device_s": [], "host_s": []})
                    for clock, values in kept.items():
                        values += took[clock]
        return {
            name: {
                "seconds": quantiles(both["device_s"]),
                "host_s": quantiles(both["host_s"]),
                "all_seconds": both["device_s"],
            }
            for name, both in seconds.items()
        }
