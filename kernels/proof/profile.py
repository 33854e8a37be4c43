"""Profiles the compiled kernels of an op without a GPU, by counting what they do when executed.

    python -m kernels.proof.profile attention --arch 90 --shape gpt2-124m

Small problems of the same variant run on the CPU: the same PTX, so the same tiles, warps, dtype and
masks. The counts of a problem of full size follow exactly. They are polynomials in the number of
tiles, since each thread block does the same work but for the number of tiles in its loops. The
polynomial goes through a few small sizes and must then give every count of every basic block of one
more size, and the number of thread blocks that the full problem launches; otherwise larger units
are tried, and then it is an error. What is counted, and how: `simgpu.executor.counters`. Passes
that only poll an mbarrier (sm_100) depend on time; here they are those of threads that run in turn.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from ..aot import aligned
from ..runtime import INTERPRETING, Launch, executing, family
from ..spec import Problem, Spec
from ..specs import SPECS
from .compile import Config, specialised
from .fenced import NAMES, Counters, built, compile_launch, execute
from .sass import DEVICES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TILED = {"T": ("BLOCK_M", "BLOCK_N", "BLOCK_T"), "M": ("BLOCK_M",), "Tmax": ("BLOCK_N",)}
"""Size of a problem that grows -> block sizes by which the kernels may walk through it."""
DEGREE = {"T": 2}
"""Largest power of a size's number of tiles in a count; 1 for the others."""
WHOLE = ("decode_attention",)
"""Ops that are executed at full size: their splits depend on it, and they read each byte once."""
TRIES = 5
"""Number of ways to choose small sizes that are tried: each unit is twice the one before."""


class NotExactError(Exception):
    """Counts of a full problem that cannot be told from small ones."""


Key = tuple[str, str]
"""A kernel's name and what it is compiled for."""
Point = tuple[int, ...]
"""Number of tiles along each axis."""


@dataclass(frozen=True, slots=True)
class Call:
    """A forward and backward of an op, of which the kernels named like `only` are of interest."""

    spec: Spec
    problem: Problem
    dtype: torch.dtype
    arch: int
    only: str = ""

    def observe(self, counters: dict[Key, Counters] | None = None) -> dict[Key, list[Launch]]:
        """Returns the launches by kernel; with `counters` they run on the CPU and are counted.

        What other kernels than `only` would write is not computed then: no count depends on it.
        """
        found: dict[Key, list[Launch]] = {}

        def take(launch: Launch) -> None:
            key = launch.kernel.__name__, repr(specialised(launch))
            if self.only not in key[0]:
                return
            found.setdefault(key, []).append(launch)
            if counters is not None:
                counter = counters.setdefault(key, Counters())
                execute(launch, self.arch, counters=counter)

        with executing(self.arch, take, DEVICES[self.arch].multiprocessors):
            self._run("meta" if counters is None else "cpu")
        return found

    def _run(self, device: str) -> None:
        def make(*sizes: int, below: int = 0) -> Tensor:
            x = torch.empty(sizes, dtype=torch.int64 if below else self.dtype, device=device)
            return x.random_(below) if below else x.normal_()

        inputs = self.spec.inputs(self.problem, make)
        floats = [x for x in inputs.values() if x.is_floating_point()]
        for x in floats:
            x.requires_grad_(self.spec.differentiable)
        found = self.spec.call(self.spec.op, self.problem, device)(*inputs.values())
        outputs = found if isinstance(found, tuple) else (found,)
        outputs = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, floats, [torch.ones_like(x) for x in outputs])


# --- from small to full ---------------------------------------------------------------------------


def at(values: np.ndarray, first: int, n: int) -> np.ndarray:
    """Returns the value at n of the polynomial through `values`, which are at first, first + 1...

    By Newton's forward differences, in integers, so that nothing is rounded.
    """
    x, total = n - first, np.zeros_like(values[0])
    for k in range(len(values)):
        # x choose k, also for x below k
        total = total + values[0] * (math.prod(x - j for j in range(k)) // math.factorial(k))
        values = values[1:] - values[:-1]
    return total


@dataclass(frozen=True, slots=True)
class Axis:
    """A size of a problem that grows: `unit` * n + `rest`, where n counts tiles."""

    name: str
    unit: int
    rest: int
    full: int
    """n of the full problem."""
    first: int
    """Smallest n of those that determine the polynomial; 0 for a batch, since an empty one launches
    nothing."""

    @property
    def fitted(self) -> range:
        """Numbers n at which the polynomial is determined; the full one alone if it is as small."""
        stop = self.first + DEGREE.get(self.name, 1) + 1
        return range(self.first, stop) if stop <= self.full else range(self.full, self.full + 1)

    @property
    def check(self) -> int:
        """The number n at which it is then tested."""
        return self.full if len(self.fitted) == 1 else 2 * self.first + 2

    def wider(self) -> Axis:
        """Returns the axis with twice the unit, or where what a batch shares forbids to begin at 0,
        with another beginning."""
        n, rest = divmod(self.unit * self.full + self.rest, 2 * self.unit)
        if self.first == 0:
            return replace(self, first=1)
        return replace(self, unit=2 * self.unit, rest=rest, full=n)


def axes(call: Call, launches: Iterable[Launch]) -> list[Axis]:
    """Returns the sizes of a problem that may grow without other code being compiled."""
    found, metas = [], [launch.meta for launch in launches]
    if call.spec.name in WHOLE:
        return []
    for name in dict.fromkeys(name for change in call.spec.changes.growing for name in change):
        if isinstance(call.problem.get(name), int):
            unit = math.lcm(*(meta[b] for meta in metas for b in TILED.get(name, ()) if b in meta))
            n, rest = divmod(call.problem[name], unit)
            found.append(Axis(name, unit, rest, n, 0 if name == "B" else 1))
    return found


class Extrapolation:
    """The counts of a call from those of small ones of the same variant."""

    def __init__(self, call: Call) -> None:
        self.call, self.full = call, call.observe()
        self.axes = axes(call, [launch for some in self.full.values() for launch in some])
        self.grids: dict[Point, dict[Key, list[Launch]]] = {}
        self.counts: dict[Point, dict[Key, Counters]] = {}
        """By sizes."""

    @property
    def whole(self) -> Point:
        return tuple(axis.full for axis in self.axes)

    def sized(self, n: Point) -> tuple[Point, Call]:
        """Returns the sizes with so many tiles along the axes, and the call."""
        sizes = {axis.name: axis.unit * x + axis.rest for axis, x in zip(self.axes, n)}
        call = replace(self.call, problem={**self.call.problem, **sizes})
        return tuple(sizes.values()), call

    def grid(self, key: Key, n: Point) -> np.ndarray:
        """Returns the thread blocks of a kernel, and the passes that its arguments make known.

        An argument P is walked through by BLOCK_P. Nothing is run.
        """
        sizes, call = self.sized(n)
        if sizes not in self.grids:
            self.grids[sizes] = call.observe() if all(sizes) else {}
        names = self.full[key][0].kernel.arg_names
        found = np.zeros(1 + len(names), np.int64)
        for launch in self.grids[sizes].get(key, []):
            blocks = [launch.meta.get(f"BLOCK_{name}") for name in names]
            walks = [-(-x // b) if b else 0 for x, b in zip(launch.args, blocks)]
            found[: 1 + len(walks)] += [math.prod(launch.grid), *walks]
        return found

    def table(self, key: Key, n: Point) -> np.ndarray:
        """Returns the counts of a kernel, by executing it."""
        sizes, call = self.sized(n)
        if not all(sizes):
            return counters_of(self.full[key][0], call.arch).table
        if sizes not in self.counts:
            self.counts[sizes] = {}
            call.observe(self.counts[sizes])
        if key not in self.counts[sizes]:
            what = "runs other code than the full problem, so it cannot stand for it"
            raise NotExactError(f"{call.spec.name}: {call.problem} {what}")
        return self.counts[sizes][key].table

    def predicted(self, of: Callable[[Key, Point], np.ndarray], key: Key, n: Point) -> np.ndarray:
        """Returns at n the polynomial through the values `of` the points where it is determined."""
        points = product(*(axis.fitted for axis in self.axes))
        values = np.stack([of(key, point) for point in points])
        values = values.reshape(*(len(axis.fitted) for axis in self.axes), *values.shape[1:])
        for axis, where in zip(self.axes, n):
            values = at(values, axis.fitted[0], where)
        return values

    def holds(self, of: Callable[[Key, Point], np.ndarray], n: Point) -> bool:
        """True if the polynomials give at n what is `of` it."""
        return all((self.predicted(of, key, n) == of(key, n)).all() for key in self.full)

    def run(self) -> dict[Key, np.ndarray]:
        """Returns the counts of the full problem.

        Raises:
            NotExactError: small problems do not foretell them.
        """
        for _ in range(TRIES):
            while not self.holds(self.grid, self.whole):
                self.axes = [replace(axis, first=max(1, 2 * axis.first)) for axis in self.axes]
            low = [max(axis.fitted[0], min(1, axis.full)) for axis in self.axes]
            points = [(*low[:k], x.check, *low[k + 1 :]) for k, x in enumerate(self.axes)]
            right = [self.holds(self.table, n) for n in points]
            if all(right):
                return {key: self.predicted(self.table, key, self.whole) for key in self.full}
            self.axes = [x if ok else x.wider() for x, ok in zip(self.axes, right)]
        what = f"{self.call.spec.name}: the counts of {self.call.problem} do not follow from those"
        raise NotExactError(f"{what} of {self.executed}")

    @property
    def executed(self) -> str:
        """Description of the sizes that were run."""
        if not self.axes:
            return "the whole problem"
        names = [axis.name for axis in self.axes]
        return ", ".join(" ".join(f"{a}={n}" for a, n in zip(names, x)) for x in self.counts)


# --- profiles -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profile:
    """Counts of one kernel, in all of its launches of a forward and a backward."""

    config: Config
    counters: Counters
    least: int
    """Fewest multiply-adds of tensor cores; 0 if not known."""
    executed: str
    """Sizes that were run: the whole problem, or small ones, the last of which confirm the rest."""


def counters_of(launch: Launch, arch: int) -> Counters:
    """Returns counters of a launch's kernel that have counted nothing."""
    compiled = compile_launch(launch, arch)
    counters = Counters()
    counters.start(built(compiled.ptx).program, compiled.warps)
    return counters


def profile(call: Call) -> list[Profile]:
    """Profiles the kernels of an op, forward and backward.

    Raises:
        NotExactError: no small problem foretells this one.
    """
    run = Extrapolation(call)
    tables, least, found = run.run(), {}, []
    for key, (launch, *more) in run.full.items():
        counters = counters_of(launch, call.arch)
        counters.table = tables[key]
        counters.thread_blocks = sum(math.prod(x.grid) for x in (launch, *more))
        config = Config(call.arch, call.spec.name, "", launch)
        found.append(Profile(config, counters, least.get(key[0], 0), run.executed))
    return found


# --- command --------------------------------------------------------------------------------------

Cells = Callable[[Profile, slice, float], list[str]]
"""Function that formats the counts of some basic blocks, divided by a number of passes."""


def instructions(x: Profile, blocks: slice, passes: float) -> list[str]:
    pipes = x.counters.pipes(blocks)
    counts = (sum(pipes.values()), *(pipes[name] for name in NAMES), x.counters.barriers(blocks))
    return [f"{n / passes:,.0f}" for n in counts]


def memory(x: Profile, blocks: slice, passes: float) -> list[str]:
    def total(field: str) -> int:
        return x.counters.total(field, blocks)

    cells = [f"{total(field) / passes / 1e6:,.4g}" for field in ("touched", "bytes")]
    fewest_of = {field: total(f"least_{field}") for field in ("sectors", "wavefronts")}
    fewest_of["multiply_adds"] = x.least if blocks == slice(None) else 0
    for field, fewest in fewest_of.items():
        ratio = f"{total(field) / fewest:.3f}" if fewest else "-"
        cells += [f"{total(field) / passes:,.0f}", ratio]
    return cells


def table(head: tuple[str, ...], profiles: Iterable[Profile], cells: Cells) -> str:
    """Formats counts of each kernel, and of a thread block in a pass of each of its loops."""
    lines = [("kernel", "times", *head)]
    for x in profiles:
        c = x.counters
        times = f"{c.thread_blocks:,} blocks of {c.warps} warps"
        lines.append((x.config.kernel, times, *cells(x, slice(None), 1)))
        for loop in c.loops():
            passes = max(1.0, c.passes(loop))
            times = f"{passes / c.thread_blocks:.2f} passes a block"
            name = f"  a block's pass, {loop.source}"
            lines.append((name, times, *cells(x, loop.blocks, passes)))
    return aligned(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.proof.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", choices=SPECS, metavar="OP", help=f"one of {', '.join(SPECS)}")
    add("--arch", type=family, default=90, choices=DEVICES, help="GPU arch [90]")
    add("--shape", default="", metavar="LABEL", help="the problem, as the Spec has it [its first]")
    add("--dtype", default="bf16", choices=DTYPES, help="dtype of the tensors [bf16]")
    args = parser.parse_args(argv)
    if INTERPRETING:
        parser.error("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    sizes = SPECS[args.op].sizes["cuda"]
    shape = args.shape or next(iter(sizes), "")
    if shape not in sizes:
        parser.error(f"--shape {shape}: {args.op} has {', '.join(sizes) or 'no shapes'}")
    call = Call(SPECS[args.op], sizes[shape], DTYPES[args.dtype], args.arch)
    try:
        profiles = profile(call)
    except NotExactError as error:
        parser.error(str(error))
    name = f"{args.op} {shape} {args.dtype} sm_{args.arch}"
    passes = "forward and backward" if call.spec.differentiable else "forward"
    print(f"{name}: {dict(call.problem)}, {passes}")
    head = ("instructions", *NAMES, "barriers")
    print(f"\nWarp instructions of PTX\n{table(head, profiles, instructions)}")
    head = ("MB, each once", "MB", "sectors", "x least", "wavefronts", "x least", "multiply-adds",
            "x least")  # fmt: skip
    print(f"\nMemory and products\n{table(head, profiles, memory)}")
    print(f"\nExact, from executing {profiles[0].executed}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
