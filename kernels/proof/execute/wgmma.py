"""wgmma: matrix products of warp groups, asynchronous to their threads (9.7.15.5)."""

import numpy as np

from .build import WARP, Build, Machine, Mask, Step, opcode, unknown
from .errors import LaneError
from .ptx import Array, Immediate, Instruction
from .tensor import a_fragment, c_fragment, c_registers, product, read_operand

GROUP = 4 * WARP
"""Threads of a warp group."""


class WarpGroups:
    """The products under way in a machine; their results are in `Machine.late`."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.group = np.zeros(m.size, np.int32)
        """Number of groups that each lane has committed."""
        self.pins: list[tuple[Array, Array, Array]] = []
        """(first lanes of warp groups, units, commit groups): what products under way read."""

    def read(self, lanes: Array, units: Array) -> None:
        """Products that the lanes asked for read units of shared memory, until they are done."""
        shared = self.m.shared
        shared.async_reads(lanes, units, "wgmma")
        shared.pinned[units] += 1  # once, however often one product reads it
        self.pins.append((lanes, units, self.group[lanes]))

    def wait(self, lanes: Array, allowed: int) -> None:
        """Products are done, but for those of the last `allowed` groups of these lanes."""
        limit = self.group[lanes] - allowed
        self.m.late.settle(lanes, limit)
        bound = np.full(self.m.size, -1)
        bound[lanes] = limit
        left = []
        for firsts, units, group in self.pins:
            done = bound[firsts] > group
            self.m.shared.pinned[units[..., done]] -= 1
            if not done.all():
                left.append((firsts[~done], units[..., ~done], group[~done]))
        self.pins = left


@opcode("wgmma.mma_async.sync.aligned")
def _wgmma(b: Build, i: Instruction) -> Step:
    """wgmma.mma_async (9.7.15.5.2): D (registers) = A (registers or shared) B (shared) + D."""
    *_, shape, of_d, kind, of_b = i.mods
    columns = int(shape.partition("n")[2].partition("k")[0])
    if of_d != "f32" or kind not in ("bf16", "f16") or kind != of_b or not shape.endswith("k16"):
        raise unknown(i)
    d, in_registers = b.vector(i.args[0], np.uint32), not isinstance(i.args[1], int)
    a = b.vector(i.args[1], np.uint32 if in_registers else np.uint64)
    of, keep = b.slot(i.args[2], np.uint64), b.slot(i.args[3], bool)
    signs, transposes = i.args[4:6], i.args[6:]
    if any(sign != Immediate(1) for sign in signs):
        raise unknown(i)
    flips = [flag == Immediate(1) for flag in transposes]

    def step(m: Machine, mask: Mask) -> None:
        m.whole_warps(mask, "wgmma")
        lanes = m.index(mask)
        firsts = lanes[::GROUP]
        if len(lanes) % GROUP or (firsts % GROUP).any():
            raise LaneError(lanes[0], "wgmma by a part of a warp group")

        def operand(slot: int, size: int, flip: bool) -> Array:
            asked = m.full(slot)[firsts]
            return read_operand(m, firsts, asked, False, size, flip, kind, m.groups.read)

        if in_registers:
            left = a_fragment(m.rows(a, mask), kind).reshape(-1, 64, 16)
        else:
            assert a[0] is not None
            left = operand(a[0], 64, flips[0])
        right = operand(of, columns, flips[-1])
        before = c_fragment(m.late.newest(d, mask)).reshape(-1, 64, columns)
        kept = np.broadcast_to(m.R[keep], m.size)[firsts][:, None, None]
        result = product(left, right.swapaxes(1, 2), np.where(kept, before, np.float32(0)))
        rows = c_registers(result.reshape(-1, 16, columns))
        m.late.defer(d, rows, lanes, m.groups.group[lanes])
        if m.counters is not None:
            m.counters.add("multiply_adds", 16 * result.size)

    return step
