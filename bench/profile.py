"""Predicts the time of an op's kernels, without a GPU: what they do, at the rates of the machine.

    python -m bench.profile attention --arch 90 --shape gpt2-124m [--tiles 64x64x4x2 ...]

`kernels.proof.profile` counts what the compiled kernels do: passes of each loop, sectors of memory,
passes over shared memory's banks, multiply-adds. The machine code says what a pass of a loop costs
(`kernels.proof.sass`). Assumptions:

    a pass      takes the most of: its busiest unit; products and the rest in turn, over the blocks
                that share a multiprocessor; its sectors at what L2 delivers; its passes over the
                banks, one a clock
    a block     also issues its code outside of the loops, and waits for its first tile
    a kernel    is spread evenly over the multiprocessors, at the boost clock, and takes no less
                than the bytes that it touches, each once, at the memory's bandwidth
    the loops   of the machine code are those of the PTX in the same order, unrolled as often as
                they have more instructions; where their numbers differ, the instructions are PTX's

All other latencies, bandwidth lost to the order of accesses, launches and the last wave are left
out, so it is a lower bound that ranks. --tiles compares tiles of attention (BLOCK_M x BLOCK_N x
warps x stages) with those that ship. A plot of each kernel's roofline is written to
bench/results/local/profile, or with --publish to docs/benchmarks.
"""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import plots
from bench.records import LOCAL, RESULTS
from bench.report import DOCS
from bench.tune.predict import FIRST_TILE, L2, identity, records
from fastgpt.errors import UserError, run_command
from fastgpt.kernels.attention.config import trying
from fastgpt.kernels.attention.spec import SHAPES, STEPS
from fastgpt.kernels.proof import sass
from fastgpt.kernels.proof.compile import Row, compile_config
from fastgpt.kernels.proof.profile import (
    DTYPES,
    NotExactError,
    Profile,
    arguments,
    chosen,
    profile,
)
from fastgpt.kernels.proof.sass import DEVICES, ISSUE
from fastgpt.kernels.runtime import INTERPRETING
from fastgpt.kernels.spec import Problem, Spec

UNITS = {"fp32": "fp32", "special": "mufu", "int": "alu", "memory": "shared", "tensor": "tensor",
         "control": "branch"}  # fmt: skip
"""Pipe of PTX instructions -> unit of machine code; moves mostly vanish there."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A kernel's predicted time, and what it follows from."""

    name: str
    tile: str
    milliseconds: float
    bound: str
    """What takes most of the time."""
    flops: float
    touched: int
    """Bytes of memory that the kernel reads or writes, each once."""
    measured: float | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Code that a thread block passes through: a loop, or the whole kernel."""

    code: sass.Loop
    """Its machine code, of one pass of PTX's."""
    passes: float
    """Passes of all thread blocks."""
    blocks: slice
    """Its basic blocks in PTX."""


def _parts(row: Row, x: Profile) -> list[_Part]:
    """Pairs the loops of the machine code with those of PTX; the whole kernel if there are none."""
    c = x.counters
    loops = c.loops()
    if len(loops) == len(row.loops) and loops:
        found = []
        for code, loop in zip(row.loops, loops):
            passes = c.warps_through(loop) / c.warps
            size = sum(c.pipes(loop.blocks).values()) / max(1, passes * c.warps)
            unrolled = max(1, round(sum(code.units.values()) / max(1, size)))
            units: Any = {unit: n / unrolled for unit, n in code.units.items()}
            found.append(_Part(replace(code, units=units), passes, loop.blocks))
        return found
    if not loops and len(row.loops) == 1:
        return [_Part(row.loops[0], c.thread_blocks, slice(None))]
    warps = c.thread_blocks * c.warps
    pipes = c.pipes()
    units = {unit: pipes[pipe] / warps for pipe, unit in UNITS.items()}
    code: Any = sass.Loop(0, units, 0, 0)  # pyright: ignore[reportArgumentType]
    return [_Part(code, c.thread_blocks, slice(None))]


def predict(row: Row, x: Profile) -> tuple[float, str]:
    """Returns (milliseconds, what takes most of them) of a kernel; see this module for the rules.

    Args:
        row: the kernel's machine code.
        x: its profile.
    """
    device, c, spent = DEVICES[row.arch], x.counters, {"start": 0.0}
    parts, resident = _parts(row, x), 1
    for part in parts:
        passes = max(1.0, part.passes)
        flops: Any = 2 * c.total("multiply_adds", part.blocks) / passes / c.warps
        top = sass.ceiling(
            replace(part.code, flops=flops), row.arch, row.warps, row.registers, row.shared
        )
        assert top is not None
        resident = max(1, top.blocks)
        clocks = {
            top.bound: top.clocks,
            "in turn": top.alone / resident,
            "L2": 32 * c.total("sectors", part.blocks) / passes / L2,
            "banks": c.total("wavefronts", part.blocks) / passes,
        }
        bound, most = max(clocks.items(), key=lambda item: item[1])
        spent[bound] = spent.get(bound, 0.0) + most * part.passes
    outside = row.instructions - sum(sum(loop.units.values()) for loop in row.loops)
    if parts[0].blocks == slice(None):
        outside = 0
    each = row.warps * outside / ISSUE + FIRST_TILE / resident
    spent["start"] = c.thread_blocks * each
    clocks = sum(spent.values()) / device.multiprocessors
    memory = c.total("touched") / device.bandwidth / 1e6
    milliseconds = clocks / device.ghz / 1e6
    if memory > milliseconds:
        return memory, "memory"
    return milliseconds, max(spent, key=lambda name: spent[name])


def flops(x: Profile) -> float:
    """FLOPs of a kernel: those of its products and of its 32-bit arithmetic."""
    ops = x.counters.opcodes()
    fp32 = sum((2 if op.startswith("fma") else 1) * n for op, n in ops.items() if _is_fp32(op))
    return 2 * x.counters.total("multiply_adds") + 32 * fp32


def _is_fp32(op: str) -> bool:
    return op.startswith(("fma", "add", "sub", "mul")) and op.endswith(".f32")


# --- an op, and its tiles -------------------------------------------------------------------------


def settings(text: str) -> dict[str, int]:
    """Reads a tile, such as "128x64x8x3".

    Raises:
        UserError: it is not of this form.
    """
    try:
        M, N, warps, stages = map(int, text.split("x"))
    except ValueError:
        form = "BLOCK_M x BLOCK_N x warps x stages, as in 128x64x8x3"
        raise UserError(f"--tiles {text}: expected {form}") from None
    return {"BLOCK_M": M, "BLOCK_N": N, "num_warps": warps, "num_stages": stages}


def predictions(
    spec: Spec, problem: Problem, dtype: torch.dtype, arch: int, tile: str = ""
) -> list[Prediction]:
    """Predicts all kernels of an op; attention's with another tile, if one is given."""
    with ExitStack() as stack:
        for step in STEPS if tile else ():
            stack.enter_context(trying(step, settings(tile)))
        profiles = profile(spec, problem, dtype, arch)
        return [_one(x, problem, dtype, tile) for x in profiles]


def _one(x: Profile, problem: Problem, dtype: torch.dtype, tile: str) -> Prediction:
    row = compile_config(x.config)
    name, meta, touched = x.config.kernel, x.config.launch.meta, x.counters.total("touched")
    warps = f"x{row.warps}x{row.stages}" if row.warps else ""
    shipped = "x".join(str(meta[b]) for b in meta if b in ("BLOCK_M", "BLOCK_N", "BLOCK_T"))
    tile = tile or f"{shipped}{warps} shipped"
    if row.error or row.spilled:
        bound = f"spills {row.spilled} bytes" if row.spilled else "does not compile"
        return Prediction(name, tile, float("inf"), bound, flops(x), touched)
    milliseconds, bound = predict(row, x)
    known = None
    if name in (kernel for kernel, _ in STEPS.values()):
        D = meta["BLOCK_D"]
        if SHAPES[D] == tuple(problem[k] for k in "BTH"):
            masks = "causal" if meta["CAUSAL"] else "full"
            row.config = f"D={problem['D']} {str(dtype).removeprefix('torch.')} {masks}"
            known = records().get(identity(row, meta))
    return Prediction(name, tile, milliseconds, bound, flops(x), touched, known)


def shown(found: list[Prediction], title: str) -> Table:
    columns = ("kernel", "tile", "predicted ms", "bound by", "TFLOP/s", "GB/s", "measured", "error")
    table = Table(*columns, title=title, title_justify="left")
    for x in sorted(found, key=lambda x: (x.name, x.milliseconds)):
        rates = (x.flops / x.milliseconds / 1e9, x.touched / x.milliseconds / 1e6)
        error = f"{x.milliseconds / x.measured - 1:+.0%}" if x.measured else "-"
        measured = f"{x.measured:.4f}" if x.measured else "-"
        numbers = (f"{x.milliseconds:.4f}", x.bound, *(f"{rate:.1f}" for rate in rates))
        table.add_row(x.name, x.tile, *numbers, measured, error)
    return table


def write_plots(found: list[Prediction], arch: int, dtype: str, folder: Path, slug: str) -> None:
    """Draws the roofline of each kernel, with a point for each tile."""
    device = DEVICES[arch]
    clocks = device.multiprocessors * device.ghz / 1e3
    roofs = {"fp32": 64 * device.fp32 * clocks}
    if dtype != "fp32":
        roofs["tensor cores"] = device.flops * clocks
    slopes = {"memory": device.bandwidth / 1e3, "L2": L2 * clocks}
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(x.name for x in found):
        points = [
            (x.tile, x.flops / x.touched, x.flops / x.milliseconds / 1e9)
            for x in found
            if x.name == name
        ]
        plots.predicted(points, roofs, slopes, folder, f"{slug}-{name.strip('_')}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments(parser)
    parser.add_argument("--tiles", nargs="+", default=[], metavar="MxNxWxS", help="attention's")
    parser.add_argument("--publish", action="store_true", help="write plots to docs/benchmarks")
    args = parser.parse_args(argv)
    if INTERPRETING:
        raise UserError("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    if args.tiles and not args.op.startswith("attention"):
        raise UserError(f"--tiles are those of attention, not of {args.op}")
    spec, problem = chosen(parser, args)
    found: list[Prediction] = []
    try:
        for tile in ("", *args.tiles):
            found += predictions(spec, problem, DTYPES[args.dtype], args.arch, tile)
    except NotExactError as error:
        raise UserError(str(error)) from None
    name = f"{args.op} {args.shape} {args.dtype} sm_{args.arch}"
    console = Console(width=None if Console().is_terminal else 130)
    console.print(shown(found, f"{name}: predicted, not measured"))
    device = DEVICES[args.arch]
    print(
        f"Assumed: {device.multiprocessors} multiprocessors at {device.ghz} GHz, {L2:.0f} bytes of"
        f" L2 a clock each, {device.bandwidth} GB/s; a first tile takes {FIRST_TILE:.0f} clocks;"
        " see --help"
    )
    if not any(x.measured for x in found):
        print("No GPU's record of these kernels exists, so the error is not known.")
    folder = DOCS / "benchmarks" if args.publish else RESULTS / LOCAL / "profile"
    write_plots(found, args.arch, args.dtype, folder, name.replace(" ", "-").replace("_", ""))
    print(f"Plots: {folder}")


if __name__ == "__main__":
    run_command(main)
