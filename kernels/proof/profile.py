"""Profiles the compiled kernels of an op without a GPU, by counting what they do when executed.

    python -m kernels.proof.profile attention --arch 90 --shape gpt2-124m

Small problems of the same form run on the CPU: the same PTX, so the same tiles, warps, dtype and
masks. The counts of a problem of full size follow exactly. They are polynomials in the number of
tiles, since each thread block does the same work but for the number of tiles in its loops. The
polynomial goes through a few small sizes and must then give every count of every basic block of one
more size, and the number of thread blocks that the full problem launches; otherwise larger units
are tried, and then it is an error. What is counted, and how: `execute.counters`.
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
from ..runtime import INTERPRETING, Launch, executing
from ..spec import Problem, Spec
from ..specs import SPECS
from .compile import Config, specialised
from .execute import Counters, compile_launch, execute
from .execute.counters import NAMES, Loop
from .execute.launch import built
from .sass import DEVICES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TILED = {"T": ("BLOCK_M", "BLOCK_N", "BLOCK_T"), "M": ("BLOCK_M",), "Tmax": ("BLOCK_N",)}
"""Size of a problem that grows -> block sizes by which the kernels may walk through it."""
DEGREE = {"T": 2}
"""Largest power of a size's number of tiles in a count; 1 for the others."""
TRIES = 5
"""Number of ways to choose small sizes that are tried: each unit is twice the one before."""


class NotExactError(Exception):
    """Counts of a full problem that cannot be told from small ones."""


Key = tuple[str, str]
"""A kernel's name and what it is compiled for."""


# --- calls ----------------------------------------------------------------------------------------


def _call(spec: Spec, problem: Problem, dtype: torch.dtype, device: str) -> None:
    """Calls an op and its backward."""
    generator = torch.Generator().manual_seed(0)

    def make(*sizes: int, below: int = 0) -> Tensor:
        if device == "meta":
            kind = torch.int64 if below else dtype
            return torch.empty(sizes, dtype=kind, device=device)
        if below:
            return torch.randint(below, sizes, generator=generator)
        return torch.randn(sizes, generator=generator).to(dtype)

    inputs = spec.inputs(problem, make)
    floats = [x for x in inputs.values() if x.is_floating_point()]
    for x in floats:
        x.requires_grad_(spec.differentiable)
    found = spec.call(spec.op, problem, device)(*inputs.values())
    outputs = found if isinstance(found, tuple) else (found,)
    outputs = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, floats, [torch.ones_like(x) for x in outputs])


def _key(launch: Launch) -> Key:
    return launch.kernel.__name__, repr(specialised(launch))


def launched(
    spec: Spec, problem: Problem, dtype: torch.dtype, arch: int
) -> dict[Key, list[Launch]]:
    """Returns the launches of an op and its backward by kernel; nothing is run."""
    found: dict[Key, list[Launch]] = {}

    def keep(launch: Launch) -> None:
        found.setdefault(_key(launch), []).append(launch)

    with executing(arch, keep, DEVICES[arch].multiprocessors):
        _call(spec, problem, dtype, "meta")
    return found


def counted(
    spec: Spec, problem: Problem, dtype: torch.dtype, arch: int, only: str = ""
) -> dict[Key, Counters]:
    """Executes an op and its backward on the CPU; returns the counts by kernel.

    With `only` all other kernels are left out. What they would have written is not computed then,
    which no count depends on.
    """
    found: dict[Key, Counters] = {}

    def run(launch: Launch) -> None:
        if only in launch.kernel.__name__:
            counters = found.setdefault(_key(launch), Counters())
            execute(launch, arch, counters=counters, fences=False)  # tests look for faults

    with executing(arch, run, DEVICES[arch].multiprocessors):
        _call(spec, problem, dtype, "cpu")
    return found


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

    def wider(self, factor: int) -> Axis:
        """Returns the axis with a larger unit."""
        n, rest = divmod(self.size(self.full), factor * self.unit)
        return replace(self, unit=factor * self.unit, rest=rest, full=n)

    def size(self, n: int) -> int:
        return self.unit * n + self.rest


def axes(spec: Spec, problem: Problem, launches: Iterable[Launch]) -> list[Axis]:
    """Returns the sizes of a problem that may grow without other code being compiled."""
    growing = dict.fromkeys(name for change in spec.growing for name in change)
    found, metas = [], [launch.meta for launch in launches]
    for name in growing:
        if isinstance(problem.get(name), int):
            blocks = [meta[b] for meta in metas for b in TILED.get(name, ()) if b in meta]
            unit = math.lcm(*blocks)
            n, rest = divmod(problem[name], unit)
            found.append(Axis(name, unit, rest, n, 0 if name == "B" else 1))
    return found


Point = tuple[int, ...]
"""Number of tiles along each axis."""
Sizes = tuple[int, ...]
"""Size along each axis."""


class Extrapolation:
    """The counts of one op's full problem from those of small ones."""

    def __init__(
        self, spec: Spec, problem: Problem, dtype: torch.dtype, arch: int, only: str = ""
    ) -> None:
        self.spec, self.problem, self.dtype, self.arch = spec, problem, dtype, arch
        self.only = only
        whole = launched(spec, problem, dtype, arch)
        self.full = {key: launches for key, launches in whole.items() if only in key[0]}
        every = [launch for launches in self.full.values() for launch in launches]
        self.axes = axes(spec, problem, every)
        self.grids: dict[Sizes, dict[Key, list[Launch]]] = {}
        self.counts: dict[Sizes, dict[Key, Counters]] = {}

    @property
    def whole(self) -> Point:
        return tuple(axis.full for axis in self.axes)

    def sized(self, n: Point) -> Problem:
        """Returns the problem with so many tiles along the axes."""
        return {**self.problem, **{axis.name: axis.size(x) for axis, x in zip(self.axes, n)}}

    # --- at a point -------------------------------------------------------------------------------

    def launches(self, n: Point) -> dict[Key, list[Launch]]:
        """Returns what would be launched."""
        sizes = tuple(axis.size(x) for axis, x in zip(self.axes, n))
        if sizes not in self.grids:
            args = (self.spec, self.sized(n), self.dtype, self.arch)
            self.grids[sizes] = launched(*args) if all(sizes) else {}
        return self.grids[sizes]

    def grid(self, key: Key, n: Point) -> np.ndarray:
        """Returns the number of thread blocks of a kernel, which is not run for it."""
        return np.array(sum(math.prod(launch.grid) for launch in self.launches(n).get(key, [])))

    def table(self, key: Key, n: Point) -> np.ndarray:
        """Returns the counts of a kernel, by executing it."""
        sizes = tuple(axis.size(x) for axis, x in zip(self.axes, n))
        if not all(sizes):
            kernel = built(compile_launch(self.full[key][0], self.arch).ptx).program
            return Counters(kernel).table
        if sizes not in self.counts:
            self.counts[sizes] = counted(self.spec, self.sized(n), self.dtype, self.arch, self.only)
        if key not in self.counts[sizes]:
            raise NotExactError(f"{self.named(sizes)} runs other code than the full problem")
        return self.counts[sizes][key].table

    # --- between points ---------------------------------------------------------------------------

    def predicted(self, of: Callable[[Key, Point], np.ndarray], key: Key, n: Point) -> np.ndarray:
        """Returns at n the polynomial through the values `of` the points where it is determined."""
        points = list(product(*(axis.fitted for axis in self.axes)))
        values = np.stack([of(key, point) for point in points])
        values = values.reshape(*(len(axis.fitted) for axis in self.axes), *values.shape[1:])
        for axis, where in zip(self.axes, n):
            values = at(values, axis.fitted[0], where)
        return values

    def follows(self, k: int) -> bool:
        """True if grids of small sizes foretell the full one, along one axis."""
        axis = self.axes[k]
        points = [(*self.whole[:k], n, *self.whole[k + 1 :]) for n in axis.fitted]
        return all(
            at(np.stack([self.grid(key, point) for point in points]), axis.fitted[0], axis.full)
            == self.grid(key, self.whole)
            for key in self.full
        )

    def step(self, k: int) -> int:
        """Returns by how much the unit of an axis has to grow so that arguments grow by blocks.

        An integer argument P is walked through by BLOCK_P.
        """
        axis, factor = self.axes[k], 1
        for key, launches in self.full.items():
            one, other = (
                self.launches((*self.whole[:k], n, *self.whole[k + 1 :])).get(key, launches)[0]
                for n in (axis.fitted[0], axis.fitted[-1])
            )
            names = one.kernel.arg_names
            for name, x, y in zip(names, one.args, other.args, strict=False):
                block = one.meta.get(f"BLOCK_{name}")
                if block and isinstance(x, int) and len(axis.fitted) > 1:
                    grows = (y - x) // (len(axis.fitted) - 1)
                    factor = math.lcm(factor, block // math.gcd(block, grows))
        return factor

    def begin(self) -> None:
        """Chooses where the axes begin and their units, by what would be launched."""
        for k in range(len(self.axes)):
            while not self.follows(k):
                self.axes[k] = replace(self.axes[k], first=max(1, 2 * self.axes[k].first))
            self.axes[k] = self.axes[k].wider(self.step(k))

    def fails(self) -> list[int]:
        """Numbers of the axes along which the polynomial misses any count of one more size."""
        found = []
        for k in range(len(self.axes)):
            n = tuple(
                axis.check if j == k else max(axis.fitted[0], min(1, axis.full))
                for j, axis in enumerate(self.axes)
            )
            if any((self.predicted(self.table, key, n) != self.table(key, n)).any()
                   for key in self.full):  # fmt: skip
                found.append(k)
        return found

    def run(self) -> dict[Key, np.ndarray]:
        """Returns the counts of the full problem.

        Raises:
            NotExactError: small problems do not foretell them.
        """
        self.begin()
        for _ in range(TRIES):
            if any(self.predicted(self.grid, key, self.whole) != self.grid(key, self.whole)
                   for key in self.full):  # fmt: skip
                break
            wrong = self.fails()
            if not wrong:
                return {key: self.predicted(self.table, key, self.whole) for key in self.full}
            for k in wrong:  # what all of a batch share is no multiple of it
                axis = self.axes[k]
                self.axes[k] = axis.wider(2) if axis.first else replace(axis, first=1)
        raise self._never()

    def _never(self) -> NotExactError:
        return NotExactError(
            f"{self.spec.name}: the counts of {self.problem} do not follow from those of small "
            f"sizes ({self.executed or 'their grids are no polynomial'})"
        )

    def named(self, sizes: Iterable[int]) -> str:
        return " ".join(f"{axis.name}={size}" for axis, size in zip(self.axes, sizes))

    @property
    def executed(self) -> str:
        """The sizes that were run."""
        return ", ".join(map(self.named, self.counts))


# --- profiles -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profile:
    """Counts of one kernel, in all of its launches of a forward and a backward."""

    config: Config
    counters: Counters
    least: int
    """Fewest multiply-adds of tensor cores; 0 if not known."""
    executed: str
    """Sizes that were run, the last of which confirmed what the others foretold."""


def profile(
    spec: Spec, problem: Problem, dtype: torch.dtype, arch: int, only: str = ""
) -> list[Profile]:
    """Profiles the kernels of an op, forward and backward, or those whose name contains `only`.

    Raises:
        NotExactError: no small problem foretells this one.
    """
    run = Extrapolation(spec, problem, dtype, arch, only)
    tables, least, found = run.run(), spec.multiply_adds(problem), []
    for key, launches in run.full.items():
        counters = Counters()
        compiled = compile_launch(launches[0], arch)
        counters.start(built(compiled.ptx).program, compiled.warps)
        counters.table, counters.thread_blocks = tables[key], int(run.grid(key, run.whole))
        config = Config(arch, spec.name, "", launches[0])
        found.append(Profile(config, counters, least.get(key[0], 0), run.executed))
    return found


# --- command --------------------------------------------------------------------------------------


def _ratio(count: float, least: float) -> str:
    return f"{count / least:.3f}" if least else "-"


def instruction_table(profiles: Iterable[Profile]) -> str:
    """Formats warp instructions by pipe: of each kernel, and of a warp in a pass of its loops."""
    lines: list[tuple[str, ...]] = [("kernel", "times", "instructions", *NAMES, "barriers")]
    for x in profiles:
        c = x.counters
        pipes = c.pipes()
        counts = (sum(pipes.values()), *(pipes[name] for name in NAMES), c.barriers)
        blocks = f"{c.thread_blocks:,} blocks of {c.warps} warps"
        lines.append((x.config.kernel, blocks, *(f"{n:,}" for n in counts)))
        for loop in c.loops():
            pipes, warps = c.pipes(loop.blocks), max(1, c.warps_through(loop))
            counts = (sum(pipes.values()), *(pipes[name] for name in NAMES))
            each = (f"{n / warps:.1f}" for n in counts)
            passes = f"{c.passes(loop):.2f} passes a block"
            lines.append((f"  a warp's pass, {loop.source}", passes, *each, ""))
    return aligned(lines)


def memory_table(profiles: Iterable[Profile]) -> str:
    """Formats memory accesses and products, and what they are over the least possible."""
    lines = [("kernel", "MB, each once", "MB", "sectors", "x least", "shared wavefronts", "x least",
              "multiply-adds", "x least")]  # fmt: skip
    for x in profiles:
        c = x.counters
        sectors, passes = c.total("sectors"), c.total("wavefronts")
        products = c.total("multiply_adds")
        figures = (
            f"{c.total('touched') / 1e6:,.1f}", f"{c.total('bytes') / 1e6:,.1f}", f"{sectors:,}",
            _ratio(sectors, c.total("least_sectors")), f"{passes:,}",
            _ratio(passes, c.total("least_wavefronts")), f"{products:,}",
            _ratio(products, x.least),
        )  # fmt: skip
        lines.append((x.config.kernel, *figures))
        for loop in c.loops():
            through = max(1, c.warps_through(loop)) / c.warps

            def each(field: str, loop: Loop = loop, c: Counters = c, n: float = through) -> float:
                return c.total(field, loop.blocks) / n

            figures = (
                "", f"{each('bytes') / 1e6:,.4f}", f"{each('sectors'):,.1f}",
                _ratio(each("sectors"), each("least_sectors")), f"{each('wavefronts'):,.1f}",
                _ratio(each("wavefronts"), each("least_wavefronts")),
                f"{each('multiply_adds'):,.0f}", "",
            )  # fmt: skip
            lines.append((f"  a block's pass, {loop.source}", *figures))
    return aligned(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name what is profiled."""
    add = parser.add_argument
    add("op", choices=SPECS, metavar="OP", help=f"one of {', '.join(SPECS)}")
    add("--arch", type=int, default=90, choices=DEVICES, help="GPU arch [90]")
    add("--shape", metavar="LABEL", help="label of the problem in the op's Spec [the first]")
    add("--dtype", default="bf16", choices=DTYPES, help="dtype of the tensors [bf16]")


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Spec, Problem]:
    """Returns the op and its problem; a wrong label is an error of the command line."""
    spec = SPECS[args.op]
    sizes = spec.sizes["cuda"]
    args.shape = args.shape or next(iter(sizes), "")
    if args.shape not in sizes:
        parser.error(f"--shape {args.shape}: {args.op} has {', '.join(sizes) or 'no shapes'}")
    return spec, sizes[args.shape]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.proof.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments(parser)
    args = parser.parse_args(argv)
    if INTERPRETING:
        parser.error("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    spec, problem = chosen(parser, args)
    try:
        profiles = profile(spec, problem, DTYPES[args.dtype], args.arch)
    except NotExactError as error:
        parser.error(str(error))
    print(
        f"{args.op} {args.shape} {args.dtype} sm_{args.arch}: {dict(problem)}, forward and backward"
    )
    print(f"\nWarp instructions of PTX\n{instruction_table(profiles)}")
    print(f"\nMemory and products\n{memory_table(profiles)}")
    print(f"\nExact: from {profiles[0].executed}, the last ones executed to confirm it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
