"""Global memory: the bytes of the tensors that a launch was given, and who touched them.

Faults are an access outside of all tensors' elements, a misaligned one, and a race: of two thread
blocks, or of two warps of one between two barriers, one writes what the other reads or writes.
Memory that is never touched is never committed, so tensors may be gigabytes apart.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from simgpu.executor.errors import LaneError
from simgpu.executor.ptx import CLASSES, U8, U16, U32, Array, Program, literal
from simgpu.executor.state import LaneState

SEVERAL = np.uint16(0xFFFF)
"""Mark of memory that several thread blocks read."""


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor that a kernel may touch.

    Args:
        name: of the kernel's argument.
        address: of its first element.
        shape: in elements.
        strides: in bytes.
        itemsize: bytes of an element.
        storage: address and bytes of the memory it lies in.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    storage: tuple[int, int]


MANY = 255
"""Warp number in a `WarpMarks` mark that stands for several warps."""


def view(data: Array, dtype: np.dtype) -> Array:
    """Bytes as elements of a type, without those left over at the end."""
    return data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)


def elements(offset: Array, unit: int, size: int) -> Array:
    """Numbers of the units of `unit` bytes that accesses touch: (units of one, *offset.shape)."""
    of_one = np.arange(max(1, size // unit)).reshape(-1, *[1] * offset.ndim)
    return (offset // unit)[None] + of_one


class WarpMarks:
    """Marks of the warps that last read and wrote each unit of memory, and since which barrier.

    A mark is `epoch << 8 | warp + 1`; the epoch counts a thread block's barriers.
    """

    def __init__(self, units: int) -> None:
        self.writer, self.reader = np.zeros(units, np.int32), np.zeros(units, np.int32)

    def read(self, mine: Array, units: Array) -> Array:
        """Marks units (..., lanes) as read; where another warp wrote since the last barrier."""
        before, last = self.reader[units], self.writer[units]
        self.reader[units] = mine
        several = (self.reader[units] != mine) | ((before >> 8 == mine >> 8) & (before != mine))
        if several.any():
            self.reader[units[several]] = np.broadcast_to(mine, units.shape)[several] | MANY
        return (last >> 8 == mine >> 8) & (last != mine)

    def clashes(self, mine: Array, units: Array) -> Array:
        """Where another warp read or wrote units since the last barrier."""
        marks = self.writer[units], self.reader[units]
        written, read = ((mark >> 8 == mine >> 8) & (mark != mine) for mark in marks)
        return written | read


class UnorderedWarps(WarpMarks):
    """Marks of warps that may read and write the same without a barrier between."""

    def read(self, mine: Array, units: Array) -> Array:
        return np.zeros(units.shape, bool)

    clashes = read


class _Segment:
    """One storage; `unit` bytes share a mark."""

    def __init__(self, regions: list[Region], unit: int, warps: type[WarpMarks]) -> None:
        self.base, self.bytes = regions[0].storage
        self.regions = regions
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * self.bytes).from_address(self.base))
        count = -(-self.bytes // unit)
        valid = np.zeros(count * unit, U8)
        for r in regions:
            shape, strides = (*r.shape, r.itemsize), (*r.strides, 1)
            np.lib.stride_tricks.as_strided(valid[r.address - self.base :], shape, strides)[...] = 1
        self.valid = valid
        self.writer, self.reader = np.zeros(count, U16), np.zeros(count, U16)
        self.atomic: Array | None = None
        """Marks of atomic accesses, in the form of `writer`; None until there is one."""
        self.warps = warps(count)

    def named(self, address: int) -> str:
        """The tensor nearest to an address, and where that is."""
        nearest = min(self.regions, key=lambda r: abs(address - r.address))
        return f"{nearest.name}{address - nearest.address:+d} bytes"


class GlobalMemory:
    """All memory of one launch."""

    def __init__(self, regions: Iterable[Region], unit: int, warp_races: bool = True) -> None:
        self.unit = unit
        warps = WarpMarks if warp_races else UnorderedWarps
        by_storage: dict[tuple[int, int], list[Region]] = {}
        for region in regions:
            if region.storage[1]:
                by_storage.setdefault(region.storage, []).append(region)
        self.segments = [_Segment(rs, unit, warps) for _, rs in sorted(by_storage.items())]
        self.bases = np.array([s.base for s in self.segments], np.uint64)

    def load(
        self, m: LaneState, lanes: Array, addresses: Array, dtype: np.dtype, count: int
    ) -> Array:
        """Elements (count, lanes)."""
        out = np.empty((count, len(lanes)), dtype)
        size = dtype.itemsize * count
        for segment, chosen, offset in self._parts(m, lanes, addresses, size, "reads"):
            mine, who = self._mine(m, lanes[chosen]), lanes[chosen]
            units, at = elements(offset, self.unit, size), (who, segment, offset)
            self._refuse_others(m, mine, segment.writer[units], "reads what {} writes", *at)
            self._refuse_atomic(m, mine, segment, units, "reads", *at)
            clash = segment.warps.read(m.mark[who], units)
            self._refuse(clash, "reads what another warp writes, without a barrier between", *at)
            seen = segment.reader[units]
            segment.reader[units] = np.where((seen == 0) | (seen == mine), mine, SEVERAL)
            again = segment.reader[units]
            many = (again != mine) & (again != SEVERAL)
            if many.any():
                segment.reader[units[many]] = SEVERAL
            out[:, chosen] = view(segment.data, dtype)[elements(offset, dtype.itemsize, size)]
        return out

    def touched(self) -> int:
        """Returns the bytes that were read, each once, and those that were written."""
        marks = (mark for s in self.segments for mark in (s.reader, s.writer))
        return self.unit * sum(int(np.count_nonzero(mark)) for mark in marks)

    def store(self, m: LaneState, lanes: Array, addresses: Array, values: Array) -> None:
        """Writes `values` (count, lanes)."""
        size = values.itemsize * len(values)
        for segment, chosen, offset in self._parts(m, lanes, addresses, size, "writes"):
            mine, who = self._mine(m, lanes[chosen]), lanes[chosen]
            units, at = elements(offset, self.unit, size), (who, segment, offset)
            for marks, did in ((segment.writer, "writes"), (segment.reader, "reads")):
                self._refuse_others(m, mine, marks[units], f"writes what {{}} {did}", *at)
            self._refuse_atomic(m, mine, segment, units, "writes", *at)
            segment.writer[units] = mine
            data = view(segment.data, values.dtype)
            index = elements(offset, values.itemsize, size)
            clash = segment.warps.clashes(m.mark[who], units).any(0)
            changed = clash & (data[index] != values[:, chosen])
            what = "writes what another warp reads or writes, without a barrier between"
            self._refuse(changed, what, *at)
            segment.warps.writer[units] = m.mark[who]
            data[index] = values[:, chosen]
            lost = (data[index] != values[:, chosen]).any(0) | (segment.writer[units] != mine)
            if lost.any():  # aligned accesses of one size meet only where their offsets are equal
                last = who[np.flatnonzero(offset == offset[np.argwhere(lost)[0][1]])[-1]]
                what = f"writes what thread {m.tid[last]} of block {m.cta[last]} writes"
                self._refuse(lost, f"{what} in the same instruction", *at)

    def change(
        self,
        m: LaneState,
        lanes: Array,
        addresses: Array,
        dtype: np.dtype,
        count: int,
        f: Callable[[Any, int, int], Any],
    ) -> Array:
        """Changes elements atomically, in the order of the lanes.

        Args:
            f: the new element, given the old one, its number of `count`, and a position in `lanes`.

        Returns:
            Array: the elements (count, lanes) that were there.
        """
        out, size = np.empty((count, len(lanes)), dtype), dtype.itemsize * count
        for segment, chosen, offset in self._parts(m, lanes, addresses, size, "changes"):
            mine, who = self._mine(m, lanes[chosen]), lanes[chosen]
            units, at = elements(offset, self.unit, size), (who, segment, offset)
            for marks, did in ((segment.writer, "writes"), (segment.reader, "reads")):
                self._refuse_others(m, mine, marks[units], f"changes what {{}} {did}", *at)
            if segment.atomic is None:
                segment.atomic = np.zeros(len(segment.writer), U16)
            seen = segment.atomic[units]
            segment.atomic[units] = np.where((seen == 0) | (seen == mine), mine, SEVERAL)
            segment.atomic[units[segment.atomic[units] != mine]] = SEVERAL
            data = view(segment.data, dtype)
            for lane, first in zip(np.arange(len(lanes))[chosen], offset // dtype.itemsize):
                for k in range(count):
                    out[k, lane] = data[first + k]
                    data[first + k] = f(data[first + k], k, lane)
        return out

    def _refuse_atomic(
        self, m: LaneState, mine: Array, segment: _Segment, units: Array, does: str, *at: Any
    ) -> None:
        if segment.atomic is not None:
            what = f"{does} what {{}} changes atomically"
            self._refuse_others(m, mine, segment.atomic[units], what, *at)

    def _mine(self, m: LaneState, lanes: Array) -> Array:
        """Mark of each lane's thread block."""
        return (m.cta[lanes] % 0xFFFE + 1).astype(U16)

    def _parts(
        self, m: LaneState, lanes: Array, addresses: Array, size: int, does: str
    ) -> Iterator[tuple[_Segment, Array | slice, Array]]:
        """(segment, lanes that go there, their byte offsets) of an access that is allowed."""
        if m.counters is not None:
            m.counters.in_global(m.size, lanes, addresses, size)
        wrong = np.flatnonzero(addresses % np.uint64(size))
        if len(wrong):
            where = self._named(int(addresses[wrong[0]]))
            what = f"{does} {size} bytes at a misaligned address, {where}"
            raise LaneError(lanes[wrong[0]], what)
        numbers = np.searchsorted(self.bases, addresses, side="right") - 1
        first = int(numbers[0])
        alone = (numbers == first).all()
        for number in [first] if alone else np.unique(numbers):
            chosen = slice(None) if alone else np.flatnonzero(numbers == number)
            segment = self.segments[max(number, 0)]
            offset = addresses[chosen].astype(np.int64) - segment.base
            inside = (offset >= 0) & (offset + size <= segment.bytes)
            if inside.all():
                word = np.dtype(f"u{min(size, 8)}")  # bytes that are looked at together
                valid = view(segment.valid, word)[elements(offset, word.itemsize, size)]
                inside = (valid == int.from_bytes(b"\1" * word.itemsize)).all(0)
            if not inside.all():
                bad = int(np.flatnonzero(~inside)[0])
                where = self._named(int(addresses[chosen][bad]))
                what = f"{does} {size} bytes outside of every tensor, {where}"
                raise LaneError(lanes[chosen][bad], what)
            yield segment, chosen, offset

    def _refuse_others(self, m: LaneState, mine: Array, marks: Array, what: str, *at: Any) -> None:
        """Raises if units have the marks of other blocks than `mine`; names the first in `what`."""
        wrong = (marks != 0) & (marks != mine)
        if wrong.any():
            first = int(marks[wrong][0])
            certain = first != SEVERAL and m.cta[-1] < 0xFFFE  # marks are numbers modulo that
            other = f"block {first - 1}" if certain else "another block"
            self._refuse(wrong, what.format(other), *at)

    def _refuse(
        self, wrong: Array, what: str, lanes: Array, segment: _Segment, offset: Array
    ) -> None:
        if wrong.any():
            lane = int(np.argwhere(wrong)[0][1])
            where = segment.named(segment.base + int(offset[lane]))
            raise LaneError(lanes[lane], f"race: {what}, {where}")

    def _named(self, address: int) -> str:
        if not self.segments:
            return "with no tensor at all"
        number = int(np.searchsorted(self.bases, np.uint64(address), side="right")) - 1
        return self.segments[max(number, 0)].named(address)


def smallest_access(program: Program, space: str) -> int:
    """Bytes of the smallest access to "global" or "shared" memory: what one mark stands for."""
    sizes = [16]
    for i in program.instructions:
        if i.op.startswith(tuple(f"{op}.{space}" for op in ("ld", "st", "atom", "red"))):
            count = next((int(mod[1:]) for mod in i.mods if mod in ("v2", "v4", "v8")), 1)
            item = U32 if i.type.endswith("x2") else CLASSES.get(i.type, U16)  # bf16
            sizes.append(item.itemsize * count)
        elif i.op.startswith("cp.async") and len(i.args) > 2:
            sizes.append(literal(i.args[2]))
        elif i.op.startswith(("tcgen05.alloc", "mbarrier")):
            sizes.append(4)
    return min(sizes)
