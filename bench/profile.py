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

It does not know that wgmma and tcgen05.mma wait for operands in shared memory, as
`bench.tune.predict` does. All other latencies, bandwidth lost to the order of accesses, launches
and the last wave are left out, so it is a lower bound that ranks. --tiles compares tiles of
attention (BLOCK_M x BLOCK_N x warps x stages) with those that ship.
"""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.tune.predict import FIRST_TILE
from fastgpt.errors import UserError, run_command
from fastgpt.kernels.attention.config import trying
from fastgpt.kernels.attention.spec import STEPS
from fastgpt.kernels.proof import sass
from fastgpt.kernels.proof.compile import Row, compile_config
from fastgpt.kernels.proof.execute.counters import pipe_of
from fastgpt.kernels.proof.profile import Call, NotExactError, Profile, arguments, chosen, profile
from fastgpt.kernels.proof.sass import DEVICES, ISSUE

UNITS = {"fp32": "fp32", "special": "mufu", "int": "alu", "memory": "shared", "tensor": "tensor",
         "control": "branch"}  # fmt: skip
"""Pipe of PTX instructions -> unit of machine code; moves mostly vanish there."""
EVERYTHING = slice(None)


@dataclass(frozen=True, slots=True)
class _Part:
    """Code that a thread block passes through: a loop, or the whole kernel."""

    units: dict[str, float]
    """Instructions of a warp in a pass, by unit."""
    passes: float
    """Passes of all thread blocks."""
    blocks: slice
    """Its basic blocks in PTX."""


def _parts(row: Row, x: Profile) -> list[_Part]:
    """Pairs the loops of the machine code with those of PTX; the whole kernel if there are none."""
    c, found = x.counters, []
    loops = c.loops()
    if loops and len(loops) == len(row.loops):
        for code, loop in zip(row.loops, loops):
            passes = c.passes(loop)
            size = sum(c.pipes(loop.blocks).values()) / max(1, passes * c.warps)
            unrolled = max(1, round(sum(code.units.values()) / max(1, size)))
            units = {unit: n / unrolled for unit, n in code.units.items()}
            found.append(_Part(units, passes, loop.blocks))
        return found
    if not loops and len(row.loops) == 1:
        return [_Part({**row.loops[0].units}, c.thread_blocks, EVERYTHING)]
    warps, pipes = c.thread_blocks * c.warps, c.pipes()
    units = {unit: pipes[pipe] / warps for pipe, unit in UNITS.items()}
    return [_Part(units, c.thread_blocks, EVERYTHING)]


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
        loop: Any = {"units": part.units, "start": 0, "bytes": 0}
        loop["wavefronts"] = round(c.total("wavefronts", part.blocks) / passes / c.warps)
        loop["flops"] = 2 * c.total("multiply_adds", part.blocks) / passes / c.warps
        size = row.warps, row.registers, row.shared, row.columns
        top = sass.ceiling(sass.Loop(**loop), row.arch, *size)
        assert top is not None
        resident = max(1, top.blocks)
        clocks = {
            top.bound: top.clocks,
            "in turn": top.alone / resident,
            "L2": 32 * c.total("sectors", part.blocks) / passes / device.l2,
            "banks": c.total("wavefronts", part.blocks) / passes,
        }
        bound, most = max(clocks.items(), key=lambda item: item[1])
        spent[bound] = spent.get(bound, 0.0) + most * part.passes
    outside = row.instructions - sum(sum(loop.units.values()) for loop in row.loops)
    outside = 0 if parts[0].blocks == EVERYTHING else outside
    spent["start"] = c.thread_blocks * (row.warps * outside / ISSUE + FIRST_TILE / resident)
    milliseconds = sum(spent.values()) / device.multiprocessors / device.ghz / 1e6
    memory = c.total("touched") / device.bandwidth / 1e6
    return max((milliseconds, max(spent, key=lambda name: spent[name])), (memory, "memory"))


# --- an op, and its tiles -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """A kernel's predicted time, and what it follows from."""

    name: str
    tile: str
    milliseconds: float
    bound: str
    """Resource that takes most of the time, or the reason why no time is predicted."""
    flops: float
    """FLOPs of the products and of the 32-bit arithmetic."""
    touched: int
    """Bytes of memory that the kernel reads or writes, each once."""


def settings(text: str) -> dict[str, int]:
    """Reads a tile, such as "128x64x8x3".

    Raises:
        UserError: it is not of this form.
    """
    numbers = text.split("x")
    if len(numbers) != 4 or not all(n.isdigit() for n in numbers):
        form = "BLOCK_M x BLOCK_N x warps x stages, as in 128x64x8x3"
        raise UserError(f"--tiles {text}: expected {form}")
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), map(int, numbers)))


def predictions(call: Call, tile: str = "") -> list[Prediction]:
    """Predicts all kernels of an op; attention's with another tile, if one is given."""
    found = []
    with ExitStack() as stack:
        for step in STEPS if tile else ():
            stack.enter_context(trying(step, settings(tile)))
        for x in profile(call):
            row, meta, c = compile_config(x.config), x.config.launch.meta, x.counters
            milliseconds, bound = float("inf"), row.error or f"spills {row.spilled} bytes"
            if not (row.error or row.spilled):
                milliseconds, bound = predict(row, x)
            fp32 = [(op, n) for op, n in c.opcodes().items() if pipe_of(op) == "fp32"]
            flops = 32 * sum((2 if op.startswith("fma") else 1) * n for op, n in fp32)
            flops += 2 * c.total("multiply_adds")
            blocks = (meta[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_T") if name in meta)
            ours = tile or f"{'x'.join(map(str, (*blocks, row.warps, row.stages)))} shipped"
            numbers = (milliseconds, bound, flops, c.total("touched"))
            found.append(Prediction(row.kernel, ours, *numbers))
    return found


def shown(found: list[Prediction], title: str) -> Table:
    columns = ("kernel", "tile", "predicted ms", "bound by", "TFLOP/s", "GB/s")
    table = Table(*columns, title=title, title_justify="left")
    for x in sorted(found, key=lambda x: (x.name, x.milliseconds)):
        rates = (f"{x.flops / x.milliseconds / 1e9:.1f}", f"{x.touched / x.milliseconds / 1e6:.0f}")
        table.add_row(x.name, x.tile, f"{x.milliseconds:.4f}", x.bound, *rates)
    return table


def main(argv: list[str]) -> None:
    kind = argparse.RawDescriptionHelpFormatter
    name = "python -m bench.profile"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=kind)
    arguments(parser)
    parser.add_argument("--tiles", nargs="+", default=[], metavar="MxNxWxS", help="attention's")
    args = parser.parse_args(argv)
    if args.tiles and not args.op.startswith("attention"):
        raise UserError(f"--tiles are those of attention, not of {args.op}")
    call = chosen(parser, args)
    try:
        found = [x for tile in ("", *args.tiles) for x in predictions(call, tile)]
    except NotExactError as error:
        raise UserError(str(error)) from None
    name, device = f"{args.op} {args.shape} {args.dtype} sm_{args.arch}", DEVICES[args.arch]
    console = Console(width=None if Console().is_terminal else 130)
    console.print(shown(found, f"{name}: predicted, not measured"))
    print(
        f"Assumed: {device.multiprocessors} multiprocessors at {device.ghz} GHz,"
        f" {device.l2:.0f} bytes of L2 a clock each, {device.bandwidth} GB/s;"
        f" a first tile takes {FIRST_TILE:.0f} clocks; see --help"
    )


if __name__ == "__main__":
    run_command(main)
