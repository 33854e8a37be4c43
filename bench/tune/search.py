"""Searches configurations of attention's kernels: lists candidates, compiles and checks them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from bench.tune.predict import milliseconds
from fastgpt.kernels.aot import check_budget
from fastgpt.kernels.attention.config import trying
from fastgpt.kernels.attention.spec import MASKS, STEPS, variant
from fastgpt.kernels.proof.compile import CompileResult, Config, compile_all
from fastgpt.kernels.proof.sass import ceiling
from fastgpt.kernels.runtime import recording

TileConfig = dict[str, int]
WARPS = (4, 8)
SIDES = {16: (32, 64, 128), 32: (16, 32, 64)}
REGISTERS = 224
"""Registers of a thread that accumulators may take: a tile that needs more certainly spills."""
KEPT = 4
"""Number of right candidates to look for; they are then tried with fewer registers."""
Tick = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Slot:
    """The calls that one row of the table of block sizes serves."""

    step: str
    bits: int
    D: tuple[int, ...]
    plain: bool | None
    """True for calls without masks, False for calls with them, None for both."""

    def row(self) -> dict[str, Any]:
        """Returns the keys of the slot's row; see `kernels.attention.config`."""
        row: dict[str, Any] = {"step": self.step, "bits": self.bits}
        row["D"] = self.D[0] if len(self.D) == 1 else list(self.D)
        return row if self.plain is None else {**row, "plain": self.plain}

    def name(self) -> str:
        which = {True: " plain", False: " masked", None: ""}[self.plain]
        return f"{self.step} {self.bits} bits D={','.join(map(str, self.D))}{which}"

    def forms(self) -> Iterator[tuple[int, str]]:
        """Yields (head dimension, masks) of each kernel variant of the row; the first one ranks."""
        for D in reversed(self.D):
            if self.plain is not False:
                yield from ((D, masks) for masks in MASKS[:2])
            if self.plain is not True:
                yield D, MASKS[2]
                if D == 128:
                    yield 80, MASKS[0]


def slots(table: Iterable[dict[str, Any]]) -> list[Slot]:
    """Returns the slots of a table, in its order."""
    found = []
    for row in table:
        D = row["D"] if isinstance(row["D"], list) else [row["D"]]
        found.append(Slot(row["step"], row["bits"], tuple(D), row.get("plain")))
    return found


@dataclass(slots=True)
class Candidate:
    """A candidate configuration (block sizes, warps, stages), with its times and problems."""

    settings: TileConfig
    rows: list[CompileResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    predicted: float = 0.0
    """Predicted milliseconds of the kernel variant that ranks the candidate."""
    measured: float | None = None
    """Milliseconds; infinite for a candidate that was not timed where others were."""
    configs: list[Config] = field(default_factory=list)

    @property
    def time(self) -> float:
        """Milliseconds used in the choice."""
        return self.predicted if self.measured is None else self.measured


def candidates(slot: Slot, stages: Iterable[int] | None = None) -> list[TileConfig]:
    """Lists all configurations whose accumulators can fit into registers.

    Args:
        stages: numbers of stages to try; None: those that may fit into shared memory.
    """
    D = max(slot.D)
    if stages is None:
        stages = (2, 3, 4) if slot.bits == 16 and D < 256 else (1, 2, 3)
    found = []
    for M, N, warps, each in product(SIDES[slot.bits], SIDES[slot.bits], WARPS, stages):
        held = {"fwd": M * D + M * N, "dq": M * D + 2 * M * N, "dkv": 2 * N * D + 2 * M * N}
        if held[slot.step] <= REGISTERS * 32 * warps:
            found.append({"BLOCK_M": M, "BLOCK_N": N, "num_warps": warps, "num_stages": each})
    return found


def configs(arch: int, slot: Slot, settings: TileConfig) -> list[Config]:
    """Returns the compiler's input for each kernel variant of the slot."""
    kernel, _ = STEPS[slot.step]
    dtype = torch.bfloat16 if slot.bits == 16 else torch.float32
    found = []
    for D, masks in slot.forms():
        with trying(slot.step, settings):
            compiled = variant(arch, D, dtype, masks)
            with recording(arch) as launches:
                compiled.run()
        (launch,) = [x for x in launches if x.kernel.__name__ == kernel]
        found.append(Config(arch, compiled.label, compiled.mma.get(kernel, ""), launch))
    return found


def _compile(found: list[Candidate], forms: slice, jobs: int | None, tick: Tick) -> None:
    """Compiles some kernel variants of each candidate and notes what is wrong with them."""
    pairs = [(x, config) for x in found for config in x.configs[forms]]
    for (x, _), row in zip(pairs, compile_all((config for _, config in pairs), jobs)):
        x.rows.append(row)
        x.problems += check_budget(row, {})
        tick()


def examine(
    arch: int, slot: Slot, requested: list[TileConfig], jobs: int | None, tick: Tick
) -> list[Candidate]:
    """Compiles one kernel variant of each candidate, then all variants of the KEPT fastest ones.

    A variant is a dtype and a set of masks; speed is predicted from machine code. The result has
    those candidates, and the ones with problems; those never compiled in full are left out.
    """
    found = [Candidate(settings, configs=configs(arch, slot, settings)) for settings in requested]
    _compile(found, slice(1), jobs, tick)
    for x in found:
        if not x.problems:
            x.predicted = milliseconds(x.rows[0], x.configs[0].launch.meta, slot.bits) or 0.0
    rest = sorted((x for x in found if not x.problems), key=lambda x: x.predicted)
    known = [x for x in found if x.problems]
    right = 0
    while rest and right < KEPT:
        now, rest = rest[: KEPT - right], rest[KEPT - right :]
        _compile(now, slice(1, None), jobs, tick)
        known += now
        right += sum(not x.problems for x in now)
    return known


def bounded(arch: int, best: list[Candidate]) -> list[TileConfig]:
    """Returns the best configurations again with fewer registers, so that one more block fits."""
    found = []
    for x in best:
        row = x.rows[0]
        if not row.loops:
            continue
        top = ceiling(row.loops[0], arch, row.warps, row.registers, row.shared, row.columns)
        if top is None or "maxnreg" in x.settings:
            continue
        bound = 65_536 // (32 * row.warps * (top.blocks + 1)) // 8 * 8
        if 0.6 * row.registers <= bound < row.registers:
            found.append({**x.settings, "maxnreg": bound})
    return found


def search(
    arch: int,
    slot: Slot,
    now: TileConfig,
    *,
    jobs: int | None = None,
    stages: Iterable[int] | None = None,
    within: list[TileConfig] | None = None,
    tick: Tick = lambda: None,
) -> list[Candidate]:
    """Returns every candidate, the shipped one included: the right ones first, fastest first.

    Args:
        now: the shipped settings.
        jobs: compilations at a time.
        stages: see `candidates`.
        within: settings to choose from, such as those that another version of Triton compiled well.
        tick: called after each compilation.
    """
    requested = candidates(slot, stages) if within is None else within
    found = examine(arch, slot, [x for x in requested if x != now], jobs, tick)
    found += examine(arch, slot, [now], jobs, tick)
    if within is None:
        right = sorted((x for x in found if not x.problems), key=lambda x: x.predicted)
        found += examine(arch, slot, bounded(arch, right), jobs, tick)
    return sorted(found, key=lambda x: (bool(x.problems), x.predicted))


def reasons(found: Iterable[Candidate]) -> Counter[str]:
    """Counts the candidates that were dropped for each reason."""
    words = ("spills", "shared memory", "has no", "does not compile", "waits")
    return Counter(
        next(word for word in words if word in x.problems[0]) for x in found if x.problems
    )
