"""Global memory: the bytes of the tensors that a launch was given, and who touched them.

Faults are an access outside of all tensors' elements, a misaligned one, and a race: one of two
thread blocks, or of two warps between two barriers, writes what the other reads or writes. Where a
warp reads what another writes, it is a fault if something depends on the read.
Memory that is never touched is never committed, so tensors may be gigabytes apart.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from simgpu.executor.errors import LaneError
from simgpu.executor.ptx import CLASSES, U8, U16, Array, Program, literal
from simgpu.executor.state import LaneState

SEVERAL = np.uint16(0xFFFF)
"""Mark of memory that several thread blocks read."""


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor that a kernel may touch, by the name of the kernel's argument."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int
    storage: tuple[int, int]
    """Address and bytes of the memory that it lies in."""


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

    A mark is `epoch << 8 | warp + 1`; the epoch counts a thread block's barriers. With `raced`,
    marks of the warps that write in a race, it finds the reads in a race alone.
    """

    def __init__(self, units: int, raced: Array | None = None) -> None:
        self.writer, self.reader = np.zeros(units, np.int32), np.zeros(units, np.int32)
        self.raced = raced

    def read(self, mine: Array, units: Array) -> Array:
        """Marks units (..., lanes) as read; where another warp wrote since the last barrier."""
        if self.raced is not None:
            return _unordered(self.raced[units], mine)
        before = self.reader[units]
        self.reader[units] = mine
        several = (self.reader[units] != mine) | ((before >> 8 == mine >> 8) & (before != mine))
        if several.any():
            self.reader[units[several]] = np.broadcast_to(mine, units.shape)[several] | MANY
        return self.written(mine, units)

    def written(self, mine: Array, units: Array) -> Array:
        """Where another warp wrote units since the last barrier."""
        return _unordered(self.writer[units], mine)

    def clashes(self, mine: Array, units: Array) -> Array:
        """Where another warp read or wrote units since the last barrier."""
        if self.raced is not None:
            return np.zeros(units.shape, bool)
        return self.written(mine, units) | _unordered(self.reader[units], mine)


def _unordered(marks: Array, mine: Array) -> Array:
    """Where marks are of the same epoch as `mine`, and of another warp."""
    return (marks >> 8 == mine >> 8) & (marks != mine)


class _Segment:
    """One storage; `unit` bytes share a mark."""

    def __init__(self, regions: list[Region], unit: int) -> None:
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
        self.warps = WarpMarks(count)
        self.raced: Array | None = None
        """Marks of warps that wrote units which others read without a barrier; None: of none."""

    def named(self, address: int) -> str:
        """The tensor nearest to an address, and where that is."""
        nearest = min(self.regions, key=lambda r: abs(address - r.address))
        return f"{nearest.name}{address - nearest.address:+d} bytes"


MARKS = {"writes": "writer", "reads": "reader", "changes atomically": "atomic"}
"""Marks of a segment by what thread blocks do to it."""


@dataclass(slots=True)
class _Access:
    """The part of an access that goes to one storage."""

    segment: _Segment
    chosen: Array | slice
    """Lanes, of those given, that access this storage."""
    lanes: Array
    offset: Array
    """Byte that each lane begins at."""
    mine: Array
    """Mark of each lane's thread block."""
    units: Array


def _mark(marks: Array, units: Array, mine: Array) -> None:
    """Marks units that several blocks may touch."""
    seen = marks[units]
    marks[units] = np.where((seen == 0) | (seen == mine), mine, SEVERAL)
    again = marks[units]
    many = (again != mine) & (again != SEVERAL)
    if many.any():
        marks[units[many]] = SEVERAL


class GlobalMemory:
    """All memory of one launch.

    A race of a read with another warp's write is noted and not yet a fault: the value may have no
    use. To find out, `launch` goes `back` and runs the thread blocks again.
    """

    def __init__(self, regions: Iterable[Region], unit: int) -> None:
        self.unit = unit
        by_storage: dict[tuple[int, int], list[Region]] = {}
        for region in regions:
            if region.storage[1]:
                by_storage.setdefault(region.storage, []).append(region)
        self.segments = [_Segment(rs, unit) for _, rs in sorted(by_storage.items())]
        self.bases = np.array([s.base for s in self.segments], np.uint64)
        self.m: LaneState
        """The machine that runs now."""
        self.races = "noted"
        """Treatment of races: they are "noted", "followed" by marks in `torn`, or "refused"."""
        self.torn: Array | None = None
        """Lanes that loaded in a race; None where nothing would follow it."""
        self.old: list[tuple[Array, Array, Array]] = []
        """Elements that were written over: a storage as elements, their numbers, the old values."""

    def raced(self) -> bool:
        """Whether a race was noted."""
        return any(s.raced is not None for s in self.segments)

    def back(self, races: str) -> None:
        """Undoes what was written since `old` was empty; from now on races are `races`."""
        while self.old:
            data, index, overwritten = self.old.pop()
            data[index] = overwritten
        self.races = races
        for s in self.segments:
            s.warps = WarpMarks(len(s.writer), s.raced if races == "followed" else None)
            s.raced = None

    def load(self, lanes: Array, addresses: Array, dtype: np.dtype, count: int) -> Array:
        """Elements (count, lanes)."""
        out = np.empty((count, len(lanes)), dtype)
        size = dtype.itemsize * count
        for at in self._parts(lanes, addresses, size, "reads"):
            segment, units = at.segment, at.units
            self._refuse_others(at, "reads", "writes", "changes atomically")
            clash = segment.warps.read(self.m.mark[at.lanes], units)
            if clash.any():
                what = "reads what another warp writes, without a barrier between"
                self._race(clash, segment.warps.writer[units], what, at)
            _mark(segment.reader, units, at.mine)
            index = elements(at.offset, dtype.itemsize, size)
            out[:, at.chosen] = view(segment.data, dtype)[index]
        return out

    def store(self, lanes: Array, addresses: Array, values: Array) -> None:
        """Writes `values` (count, lanes)."""
        m, size = self.m, values.itemsize * len(values)
        for at in self._parts(lanes, addresses, size, "writes"):
            segment, units, who = at.segment, at.units, at.lanes
            self._refuse_others(at, "writes", "writes", "reads", "changes atomically")
            segment.writer[units] = at.mine
            data = view(segment.data, values.dtype)
            index = elements(at.offset, values.itemsize, size)
            changed = (self._kept(data, index) != values[:, at.chosen]).any(0)
            clash = segment.warps.clashes(m.mark[who], units) & changed
            if clash.any():
                what = "writes what another warp reads or writes, without a barrier between"
                self._refuse(clash & segment.warps.written(m.mark[who], units), what, at)
                self._race(clash, np.broadcast_to(m.mark[who], units.shape), what, at)
            segment.warps.writer[units] = m.mark[who]
            data[index] = values[:, at.chosen]
            lost = (data[index] != values[:, at.chosen]).any(0) | (segment.writer[units] != at.mine)
            if lost.any():  # aligned accesses of one size meet only where their offsets are equal
                same = at.offset == at.offset[np.argwhere(lost)[0][1]]
                last = who[np.flatnonzero(same)[-1]]
                what = f"writes what thread {m.tid[last]} of block {m.cta[last]} writes"
                self._refuse(lost, f"{what} in the same instruction", at)

    def change(
        self, lanes: Array, addresses: Array, dtype: np.dtype, count: int,
        f: Callable[[Any, int, int], Any],
    ) -> Array:  # fmt: skip
        """Changes elements atomically, in the order of the lanes.

        Args:
            f: the new element, given the old one, its number of `count`, and a position in `lanes`.

        Returns:
            Array: the elements (count, lanes) that were there.
        """
        out, size = np.empty((count, len(lanes)), dtype), dtype.itemsize * count
        for at in self._parts(lanes, addresses, size, "changes"):
            segment = at.segment
            self._refuse_others(at, "changes", "writes", "reads")
            if segment.atomic is None:
                segment.atomic = np.zeros(len(segment.writer), U16)
            _mark(segment.atomic, at.units, at.mine)
            data = view(segment.data, dtype)
            self._kept(data, elements(at.offset, dtype.itemsize, size))
            for lane, first in zip(np.arange(len(lanes))[at.chosen], at.offset // dtype.itemsize):
                for k in range(count):
                    out[k, lane] = data[first + k]
                    data[first + k] = f(data[first + k], k, lane)
        return out

    def _kept(self, data: Array, index: Array) -> Array:
        """Elements that are about to be written over; `back` restores them."""
        old = data[index]
        if self.m.warps > 1:
            self.old.append((data, index, old))
        return old

    def _race(self, clash: Array, writer: Array, what: str, at: _Access) -> None:
        """Where `clash` is set, one warp reads and the warp marked in `writer` writes."""
        if self.races == "noted":
            if at.segment.raced is None:
                at.segment.raced = np.zeros(len(at.segment.writer), np.int32)
            before = at.segment.raced[at.units]
            at.segment.raced[at.units[clash]] = writer[clash]  # one writer's mark alone fits:
            clash &= ((before != 0) & (before != writer)) | (at.segment.raced[at.units] != writer)
        elif self.races == "followed" and self.torn is not None:
            self.torn[at.lanes[clash.any(0)]] = True
            return
        self._refuse(clash, what, at)

    def _parts(self, lanes: Array, addresses: Array, size: int, does: str) -> Iterator[_Access]:
        """An access that is allowed, by storage."""
        m = self.m
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
            segment, who = self.segments[max(number, 0)], lanes[chosen]
            offset = addresses[chosen].astype(np.int64) - segment.base
            inside = (offset >= 0) & (offset + size <= segment.bytes)
            if inside.all():
                word = np.dtype(f"u{min(size, 8)}")  # bytes that are looked at together
                valid = view(segment.valid, word)[elements(offset, word.itemsize, size)]
                inside = (valid == int.from_bytes(b"\1" * word.itemsize)).all(0)
            if not inside.all():
                bad = int(np.flatnonzero(~inside)[0])
                where = self._named(int(addresses[chosen][bad]))
                raise LaneError(who[bad], f"{does} {size} bytes outside of every tensor, {where}")
            mine = (m.cta[who] % 0xFFFE + 1).astype(U16)
            yield _Access(segment, chosen, who, offset, mine, elements(offset, self.unit, size))

    def _refuse_others(self, at: _Access, does: str, *others_do: str) -> None:
        """Raises if another block than the lanes' own did something of that to what they access."""
        for did in others_do:
            marks = getattr(at.segment, MARKS[did])
            if marks is None:
                continue
            marks = marks[at.units]
            wrong = (marks != 0) & (marks != at.mine)
            if wrong.any():
                first = int(marks[wrong][0])
                certain = first != SEVERAL and self.m.cta[-1] < 0xFFFE  # marks are modulo that
                other = f"block {first - 1}" if certain else "another block"
                self._refuse(wrong, f"{does} what {other} {did}", at)

    def _refuse(self, wrong: Array, what: str, at: _Access) -> None:
        if wrong.any():
            lane = int(np.argwhere(wrong)[0][1])
            where = at.segment.named(at.segment.base + int(at.offset[lane]))
            raise LaneError(at.lanes[lane], f"race: {what}, {where}")

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
            sizes.append(CLASSES[i.type].itemsize * count)
        elif i.op.startswith("cp.async") and len(i.args) > 2:
            sizes.append(literal(i.args[2]))
        elif i.op.startswith(("tcgen05.alloc", "mbarrier")):
            sizes.append(4)
    return min(sizes)
