"""Predicts the time of attention's kernels from their machine code.

A kernel's time is what its loops' passes and its programs' fixed part take on all multiprocessors:

    a pass      the most of: the busiest unit's clocks (`kernels.proof.sass.ceiling`, with
                `product_clocks`); the tile's bytes at what L2 delivers; products and the rest in
                turn, over the blocks that take turns. Where products wait for a load that was only
                just asked for (`Loop.waits`), its latency, over the same blocks
    a program   its instructions outside of the loops, at the issue rate, and the wait for its first
                tile, over the same blocks

Not included: every other latency, memory beyond L2, the last wave of programs. So it is a lower
bound that ranks tiles of different size; only the records of a GPU show how far off it is.
"""

import math
from dataclasses import replace
from typing import Any

from fastgpt.kernels.attention.spec import SHAPES, STEPS, WINDOW
from fastgpt.kernels.proof.compile import CompileResult
from fastgpt.kernels.proof.sass import ISSUE, ceiling, device_of
from fastgpt.kernels.runtime import family

LATENCY = 700.0
"""GPU cycles until a tile arrives from L2 while all multiprocessors read; 500 to 900 are likely."""
FIRST_TILE = 1000.0
"""GPU cycles until a program's first loads arrive, about two trips to memory."""
SCORES, OTHERS = {"fwd": 1, "dq": 2, "dkv": 2}, {"fwd": 1, "dq": 1, "dkv": 2}
"""Numbers of products in a pass: those that sum over D (scores, dP), and those with D columns."""
INSTRUCTION_ROWS = {90: 64, 100: 128}
"""Arch -> rows of an instruction (wgmma, tcgen05.mma)."""
SHARED_BYTES = 128.0
"""Bytes of shared memory that one multiprocessor reads per cycle."""
STEP_OF = {kernel: step for step, (kernel, _) in STEPS.items()}


def passes(T: int, block_m: int, block_n: int, causal: bool, window: int | None) -> tuple[int, int]:
    """Counts the tiles of a head's (T, T) scores that need no mask and those that need one."""
    full = masked = 0
    for first in range(0, T, block_m):
        last = min(first + block_m, T) - 1
        some = [0, last if causal else T - 1]
        every = [0, first if causal else T - 1]
        if window is not None:
            some[0], every[0] = max(0, first - window + 1), max(0, last - window + 1)
        tiles = some[1] // block_n - some[0] // block_n + 1
        unmasked = max(0, (every[1] + 1) // block_n - -(-every[0] // block_n))
        full, masked = full + unmasked, masked + tiles - unmasked
    return full, masked


def product_clocks(arch: int, step: str, M: int, N: int, D: int) -> float:
    """Returns the clocks that the tensor cores take for the 16-bit products of a pass.

    On sm_90 and sm_100 an instruction takes at least as long as its operands take to be read from
    shared memory: the right one, and for products that sum over D the left one, too (the others
    have theirs in registers or tensor memory). So narrow tiles wait. Instructions of fewer rows
    than the largest are taken to last as long as it; tiles of fewer than 64 rows have other
    instructions, which are slower as well.
    """
    m, n = (N, M) if step == "dkv" else (M, N)  # there the scores are transposed
    device = device_of(arch)
    assert device is not None
    full = INSTRUCTION_ROWS.get(family(arch))
    clocks = 0.0
    for count, columns, depth, left in ((SCORES[step], n, D, True), (OTHERS[step], D, n, False)):
        if full is None:
            clocks += count * 2 * m * columns * depth / device.flops
            continue
        rows = min(m, full)
        read = 2 * depth * (columns + left * rows) / SHARED_BYTES
        clocks += count * (m / rows) * max(2 * full * columns * depth / device.flops, read)
    return clocks


def milliseconds(row: CompileResult, meta: dict[str, Any], bits: int) -> float | None:
    """Predicts the time at `kernels.attention.spec.SHAPES`; None without figures or loops.

    Args:
        row: compiled form of one of attention's kernels.
        meta: the constexprs of its launch.
        bits: width of the dtype.
    """
    device = device_of(row.arch)
    # The two loops with most instructions; the masked one has more than the other.
    main = sorted(row.loops, key=lambda x: sum(x.units.values()))[-2:]
    if device is None or not main:
        return None
    step, D = STEP_OF[row.kernel], meta["BLOCK_D"]
    B, T, H = SHAPES[D]
    M, N = meta["BLOCK_M"], meta["BLOCK_N"]
    products = product_clocks(row.arch, step, M, N, D) if bits == 16 else 0.0
    flops = int(products * device.flops / row.warps)  # waiting counts as multiplying
    l2 = 2 * (M if step == "dkv" else N) * D * bits / 8 / device.l2
    clocks, blocks = [], 1
    for loop in main:
        # Warps that have no rows of their own repeat the products of others.
        loop = replace(loop, flops=max(flops, loop.flops))
        top = ceiling(loop, row.arch, row.warps, row.registers, row.shared, row.columns)
        assert top is not None
        blocks = max(1, top.blocks)
        wait = LATENCY / blocks if loop.waits else 0.0
        clocks.append(max(top.clocks, top.alone / blocks, l2) + wait)
    causal = meta["CAUSAL"]
    full, masked = passes(T, M, N, causal, WINDOW if meta["WINDOW"] else None)
    programs = math.ceil(T / (N if step == "dkv" else M))
    if step == "dkv":  # one program serves all heads of a group
        programs = math.ceil(programs / meta["GROUP"])
    outside = row.instructions - sum(sum(x.units.values()) for x in row.loops)
    fixed = row.warps * outside / ISSUE + FIRST_TILE / blocks
    total = full * clocks[0] + masked * clocks[-1] + programs * fixed
    return B * H * total / device.multiprocessors / device.ghz / 1e6
