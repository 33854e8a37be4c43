"""State of the lanes: their places in the grid, their registers, and who takes part.

A register is an array over all lanes, or a numpy scalar while all lanes agree; None is one that
was never written.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from simgpu.executor.errors import LaneError
from simgpu.executor.ptx import WARP, Array, Program

Mask = Array | None
"""Lanes that take part, bool (lanes,); None for all of them."""
WHOLE = np.uint8(15)
"""Mark of a register that was not written; each bit marks a quarter of it, from the lowest."""
BITS = {2: 0xDEAD, 4: 0xDEADBEEF, 8: 0xDEADBEEFDEADBEEF, 1: 0}
"""Bytes -> bits of a register in lanes that never wrote it."""


class LaneState:
    """The lanes of some thread blocks; `Machine` adds memory and control flow, and says of what."""

    def __init__(self, program: Program, registers: list[Any], threads: int, blocks: Array) -> None:
        self.program, self.R = program, registers
        self.unwritten: dict[int, Array] = {}
        """Slot -> lanes that never wrote it, as marks: see `unwritten`."""
        self.threads, self.warps = threads, threads // WARP
        self.size = len(blocks) * threads
        self.lanes = np.arange(self.size)
        self.block = np.repeat(np.arange(len(blocks)), threads)
        """Lane -> number of its thread block in this machine."""
        self.cta = np.repeat(blocks, threads)
        """Lane -> number of its thread block in the grid."""
        self.tid = self.lanes % threads
        self.warp = self.tid // WARP
        self.spinning = np.zeros(self.size, bool)
        """Lanes that polled an mbarrier in vain since the last thing that could complete it."""
        self.epoch = np.ones(len(blocks), np.int32)
        """Thread block -> number of times that all its warps have met."""
        self.meet(None)

    def meet(self, blocks: Array | None) -> None:
        """All warps of the thread blocks (bool; None: of all) have met at a barrier."""
        self.epoch[slice(None) if blocks is None else blocks] += 1
        self.mark = ((self.epoch[self.block] << 8) | (self.warp + 1)).astype(np.int32)
        """Lane -> what its warp leaves on memory that it touches: see `memory.WarpMarks`."""

    def active(self, mask: Mask, slot: int, negated: bool) -> tuple[bool, Mask]:
        """(Does any lane take part?, the lanes) of a guarded instruction."""
        guard = self.R[slot]
        guard = ~guard if negated else guard
        if np.ndim(guard) == 0:
            return bool(guard), mask
        taking = guard if mask is None else guard & mask
        count = int(np.count_nonzero(taking))
        return count > 0, (None if count == self.size else taking)

    def index(self, mask: Mask) -> Array:
        """Numbers of the lanes that take part."""
        return self.lanes if mask is None else np.flatnonzero(mask)

    def put(self, slot: int, value: Any, mask: Mask) -> None:
        """Writes a register in the lanes that take part."""
        if mask is None:
            self.R[slot] = value
            if self.unwritten:
                self.unwritten.pop(slot, None)
            return
        old = self.R[slot]
        if old is None:
            old = value.dtype.type(BITS[value.dtype.itemsize])
            self.unwritten[slot] = np.where(mask, np.uint8(0), WHOLE)
        elif slot in self.unwritten:
            self.unwritten[slot] = np.where(mask, np.uint8(0), self.unwritten[slot])
        self.R[slot] = np.where(mask, value, old)

    def full(self, slot: int) -> Array:
        """A register as an array over all lanes."""
        value = self.R[slot]
        if value is None:
            raise TypeError("a register that was never written")
        return value if np.ndim(value) else np.full(self.size, value)

    def addresses(self, slot: int, offset: Any, mask: Mask) -> Array:
        """Addresses [slot + offset] of the lanes that take part."""
        addresses = self.full(slot) + offset
        return addresses if mask is None else addresses[self.index(mask)]

    def each(self, mask: Mask, slot: int, offset: np.unsignedinteger) -> list[tuple[int, int]]:
        """(lane, address) of each lane that takes part."""
        addresses = self.addresses(slot, offset, mask)
        return [(int(n), int(at)) for n, at in zip(self.index(mask), addresses)]

    def rows(self, slots: Sequence[int | None], mask: Mask, dtype: Any = np.uint32) -> Array:
        """Registers of the lanes that take part, (registers, lanes); of wider ones the low bits."""
        values = [self.full(slot) for slot in slots if slot is not None]
        lanes = self.index(mask)
        whole = np.stack(values if mask is None else [value[lanes] for value in values])
        return whole.astype(dtype, copy=False)

    def put_rows(self, slots: Sequence[int | None], rows: Array, mask: Mask) -> None:
        """Writes registers from (registers, lanes); wider ones are extended."""
        for slot, row in zip(slots, rows):
            if slot is None:
                continue
            whole = row.astype(self.program.dtypes[slot], copy=False)
            if mask is not None:
                part, whole = whole, np.zeros(self.size, whole.dtype)
                whole[mask] = part
            self.put(slot, whole, mask)

    def whole_warps(self, mask: Mask, what: str) -> None:
        """Raises unless a warp's threads take part together, as `.sync` asks for."""
        if mask is not None:
            counts = mask.reshape(-1, WARP).sum(1)
            broken = np.flatnonzero((counts > 0) & (counts < WARP))
            if len(broken):
                raise LaneError(broken[0] * WARP, f"{what}: only {counts[broken[0]]} of 32 threads")
