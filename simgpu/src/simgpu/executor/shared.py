"""Shared memory of the thread blocks: its bytes, and marks by which faults are noticed.

Between two barriers no two warps may touch the same bytes if one of them writes another value:
that is a race, whatever order the warps ran in here. Bytes that nobody wrote, bytes that a copy is
still on its way to, and bytes that a product still reads are marked as such.
"""

import numpy as np

from simgpu.executor.errors import LaneError
from simgpu.executor.memory import WarpMarks, elements
from simgpu.executor.ptx import Array
from simgpu.executor.state import LaneState

NOTHING, READY, COMING = 0, 1, 2
"""States of memory: never written, readable, awaiting an asynchronous copy."""


class SharedMemory:
    """The shared memory of all thread blocks of a machine, one after the other."""

    def __init__(self, m: LaneState, size: int, unit: int) -> None:
        self.m, self.size, self.unit = m, size, unit
        blocks = len(m.epoch)
        self.stride = -(-max(size, 16) // 16) * 16
        self.data = np.zeros(blocks * self.stride, np.uint8)
        units = blocks * self.stride // unit
        self.state = np.zeros(units, np.uint8)
        self.warps = WarpMarks(units)
        self.unfenced = np.zeros(units, bool)
        """Written by a thread, and not yet visible to the tensor cores' reads (the async proxy)."""
        self.pinned = np.zeros(units, np.int16)
        """Number of products in flight that read it."""

    # --- access -----------------------------------------------------------------------------------

    def place(self, lanes: Array, addresses: Array, size: int, does: str) -> Array:
        """Byte offsets of accesses of `size` bytes; a fault if misaligned or out of bounds."""
        addresses = addresses.astype(np.int64)
        wrong = (addresses % size != 0) | (addresses + size > self.size)
        if wrong.any():
            n = int(np.argwhere(wrong)[0][0])
            at = int(addresses[n].max()) if addresses.ndim > 1 else int(addresses[n])
            why = "misaligned" if at % size else f"outside of the {self.size} bytes there are"
            raise LaneError(lanes[n], f"{does} {size} bytes of shared memory at {at}: {why}")
        base = self.m.block[lanes] * self.stride
        return addresses + (base[:, None] if addresses.ndim > 1 else base)

    def units(self, offset: Array, size: int) -> Array:
        """Numbers of the units that accesses touch: (units of one, *offset.shape)."""
        return elements(offset, self.unit, size)

    def load(self, lanes: Array, addresses: Array, dtype: np.dtype, count: int) -> Array:
        """Elements (count, lanes)."""
        size = dtype.itemsize * count
        offset = self.place(lanes, addresses, size, "reads")
        self.reads(lanes, self.units(offset, size))
        return self.data.view(dtype)[elements(offset, dtype.itemsize, size)]

    def store(self, lanes: Array, addresses: Array, values: Array) -> None:
        """Writes `values` (count, lanes)."""
        size = values.itemsize * len(values)
        offset = self.place(lanes, addresses, size, "writes")
        units, index = self.units(offset, size), elements(offset, values.itemsize, size)
        data = self.data.view(values.dtype)
        clash = self.clashes(lanes, units)
        if clash is not None and (np.take(data, index) != values)[:, clash].any():
            changed = clash & (np.take(data, index) != values).any(0)
            self._race(lanes, changed, "writes what another warp reads or writes")
        data[index] = values
        self.written(lanes, units)
        if (data[index] != values).any():
            self._lost(lanes, index, values)

    def _lost(self, lanes: Array, index: Array, values: Array) -> None:
        """Raises where a write is lost to another of the same instruction, but for rounding.

        Of threads of a warp any one's value stays (CUDA guide, "SIMT Architecture"), and Triton
        relies on it: a sum over lanes is stored from every lane that holds it. Where a lane has one
        term, LLVM may fuse its multiplication into the addition, so that lanes round differently:
        float32 within a warp may differ by 2**-20 of the largest value that is stored.
        """
        stays_here = self.data.view(values.dtype)[index]
        lost = stays_here != values
        if values.itemsize in (4, 8):  # Triton 3.9 stores two of them as one number of 64 bits
            mine, other = (
                np.ascontiguousarray(x)[..., None].view(np.float32) for x in (values, stays_here)
            )
            near = np.abs(mine - other) <= 2.0**-20 * np.fmax.reduce(np.abs(mine), axis=None)
            near = (near | (np.isnan(mine) & np.isnan(other))).all(-1)
        else:
            near = np.zeros(lost.shape, bool)
        warp = self.m.warp[lanes] + self.m.block[lanes] * self.m.warps
        stays = np.zeros(int(index.max()) + 1, warp.dtype)
        stays[index] = warp
        wrong = (lost & ~(near & (stays[index] == warp))).any(0)
        self._race(lanes, wrong, "writes what another thread writes in the same instruction")

    # --- marks ------------------------------------------------------------------------------------

    def reads(self, lanes: Array, units: Array) -> None:
        """Marks units (..., lanes) as read by the lanes' warps; a fault if they may not be."""
        state = self.state[units]
        if (state != READY).any():
            n = self._first(state != READY)
            why = "is still being copied" if state[..., n].max() == COMING else "nobody wrote"
            raise LaneError(lanes[n], f"reads shared memory that {why}")
        clash = self.warps.read(self.m.mark[lanes], units)
        self._race(lanes, clash, "reads what another warp writes")

    def clashes(self, lanes: Array, units: Array) -> Array | None:
        """Lanes that write what another warp touched since the last barrier, or None."""
        what = "writes shared memory that"
        self._refuse(lanes, self.state[units] == COMING, f"{what} is still being copied to")
        self._refuse(lanes, self.pinned[units] > 0, f"{what} a product under way still reads")
        clash = self.warps.clashes(self.m.mark[lanes], units)
        return np.any(clash.reshape(-1, len(lanes)), axis=0) if clash.any() else None

    def refuse_clashes(self, lanes: Array, units: Array, does: str) -> None:
        """A fault if another warp touched since the last barrier what the lanes will write."""
        clash = self.clashes(lanes, units)
        if clash is not None:
            self._race(lanes, clash, f"{does} what another warp reads or writes")

    def async_reads(self, lanes: Array, units: Array, who: str) -> None:
        """Like `reads`, by tensor cores, which see what threads wrote only after a fence."""
        what = f"{who} reads what threads wrote, without a fence.proxy.async between"
        self._refuse(lanes, self.unfenced[units], what)
        self.reads(lanes, units)

    def written(self, lanes: Array, units: Array) -> None:
        """Marks units as written by the lanes' warps."""
        self.warps.writer[units] = self.m.mark[lanes]
        self.state[units] = READY
        self.unfenced[units] = True

    def fence(self, lanes: Array) -> None:
        """Makes visible what these warps wrote, and all that was before the last barrier."""
        if len(lanes) == self.m.size:
            self.unfenced[:] = False
            return
        fenced = np.zeros((len(self.m.epoch), self.m.warps + 1), bool)
        fenced[self.m.block[lanes], self.m.warp[lanes] + 1] = True
        mark = self.warps.writer.reshape(len(self.m.epoch), -1)
        older = (mark >> 8 < self.m.epoch[:, None]) & np.any(fenced, axis=1, keepdims=True)
        own = np.take_along_axis(fenced, np.minimum(mark & 255, self.m.warps), 1)
        self.unfenced &= ~(older | own).reshape(-1)

    def _first(self, wrong: Array) -> int:
        """Number of the first lane, the last axis, with a wrong unit."""
        return int(np.flatnonzero(wrong.reshape(-1, wrong.shape[-1]).any(0))[0])

    def _refuse(self, lanes: Array, wrong: Array, what: str) -> None:
        if wrong.any():
            raise LaneError(lanes[self._first(wrong)], what)

    def _race(self, lanes: Array, wrong: Array, what: str) -> None:
        self._refuse(lanes, wrong, f"race: {what} in shared memory, without a barrier between")
