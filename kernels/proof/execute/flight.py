"""Asynchronous work: copies to shared memory, and registers that will be written later.

Nothing asynchronous happens before something waits for it, as late as the ISA allows. Code that
waits too little meets memory that is still being copied to, or registers that hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from .build import Build, Machine, Mask, Step, address_of, literal, opcode, unknown
from .ptx import Array, Instruction
from .shared import COMING

NAN = np.uint32(0x7FFF_FFFF)


# --- copies ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Copy:
    """One cp.async: bytes that will arrive in shared memory."""

    lanes: Array
    offset: Array
    """Byte offset of each lane's destination."""
    data: Array
    """(lanes, bytes)."""
    group: Array
    """Number of the commit group of each lane."""

    def part(self, chosen: Array) -> "Copy":
        """The copies of some of the lanes."""
        parts = (self.lanes, self.offset, self.data, self.group)
        return Copy(*(part[chosen] for part in parts))


class Copies:
    """All copies under way in a machine."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.pending: list[Copy] = []
        self.group = np.zeros(m.size, np.int32)
        """Number of groups that each lane has committed."""

    def start(self, lanes: Array, offset: Array, data: Array) -> None:
        """Bytes (lanes, bytes) are on their way to shared memory."""
        shared = self.m.shared
        units = shared.units(offset, data.shape[1])
        shared.refuse_clashes(lanes, units, "copies to")
        shared.state[units] = COMING
        self.pending.append(Copy(lanes, offset, data, self.group[lanes]))

    def wait(self, lanes: Array, allowed: int) -> None:
        """Copies arrive, but for those of the last `allowed` groups of these lanes."""
        waiting = np.zeros(self.m.size, bool)
        waiting[lanes] = True
        limit, left, shared = self.group - allowed, [], self.m.shared
        for copy in self.pending:
            done = waiting[copy.lanes] & (copy.group < limit[copy.lanes])
            if done.any():
                arriving = copy.part(done)
                size = arriving.data.shape[1]
                shared.data[arriving.offset[:, None] + np.arange(size)] = arriving.data
                shared.written(arriving.lanes, shared.units(arriving.offset, size))
            if not done.all():
                left.append(copy.part(~done))
        self.pending = left


@opcode("cp.async.cg.shared.global", "cp.async.ca.shared.global")
def _copy(b: Build, i: Instruction) -> Step:
    """cp.async (9.7.9.25.3): the bytes from the fourth operand on are zeros."""
    to, to_offset = address_of(b, i.args[0], np.uint32)
    of, of_offset = address_of(b, i.args[1], np.uint64)
    size = literal(i.args[2])
    given = b.slot(i.args[3] if len(i.args) > 3 else i.args[2], np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.index(mask)
        offset = m.shared.place(lanes, m.addresses(to, to_offset, mask), size, "copies")
        read = m.full(given)[lanes]
        if ((read != 0) & (read != size)).any():
            raise unknown(i)
        data, whole = np.zeros((len(lanes), size), np.uint8), np.flatnonzero(read)
        if len(whole):
            addresses = (m.full(of) + of_offset)[lanes[whole]]
            words = m.memory.load(m, lanes[whole], addresses, np.dtype("u4"), size // 4)
            data[whole] = np.ascontiguousarray(words.T).view(np.uint8)
        m.copies.start(lanes, offset, data)

    return step


WORK = {"cp": attrgetter("copies"), "wgmma": attrgetter("groups")}
"""Beginning of an opcode -> what keeps its work in a machine, in groups that can be waited for."""


@opcode("cp.async.commit_group", "wgmma.commit_group.sync.aligned")
def _commit(b: Build, i: Instruction) -> Step:
    work = WORK[i.mods[0]]

    def step(m: Machine, mask: Mask) -> None:
        work(m).group[m.index(mask)] += 1

    return step


@opcode("cp.async.wait_group", "wgmma.wait_group.sync.aligned")
def _wait(b: Build, i: Instruction) -> Step:
    work, allowed = WORK[i.mods[0]], literal(i.args[-1])  # Triton has accumulators before it
    return lambda m, mask: work(m).wait(m.index(mask), allowed)


@opcode("fence.proxy.async")
def _fence(b: Build, i: Instruction) -> Step:
    """fence.proxy.async (9.7.14.4): what threads wrote becomes visible to tensor cores."""
    return lambda m, mask: m.shared.fence(m.index(mask))


# --- registers ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Late:
    """A register that an instruction under way will write."""

    value: Array
    group: Array
    """Number of the commit group of each lane; -1 where nothing is under way."""


class LateRegisters:
    """All such registers of a machine; until they are written they hold NaN."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.slots: dict[int, Late] = {}

    def defer(self, slots: list[int | None], rows: Array, lanes: Array, group: Array) -> None:
        """Registers will have the values (registers, lanes) when their groups are waited for."""
        for slot, row in zip(slots, rows):
            if slot is None:
                continue
            new = Late(np.zeros(self.m.size, np.uint32), np.full(self.m.size, -1))
            late = self.slots.setdefault(slot, new)
            late.value[lanes] = row
            late.group[lanes] = group
            before = self.m.R[slot]
            whole = np.full(self.m.size, NAN if before is None else before)
            whole[lanes] = NAN
            self.m.R[slot] = whole

    def newest(self, slots: list[int | None], mask: Mask) -> Array:
        """Registers as the next product in line will find them (registers, lanes)."""
        lanes = self.m.index(mask)
        if all(slot is not None and self.m.R[slot] is None for slot in slots):
            return np.zeros((len(slots), len(lanes)), np.uint32)  # a first product ignores them
        rows = self.m.rows(slots, mask)
        for row, slot in zip(rows, slots):
            late = None if slot is None else self.slots.get(slot)
            if late is not None:
                row[:] = np.where(late.group[lanes] >= 0, late.value[lanes], row)
        return rows

    def settle(self, lanes: Array, limit: Array) -> None:
        """Registers of groups below `limit` (lanes,) are written."""
        for slot, late in list(self.slots.items()):
            group = late.group[lanes]
            done = lanes[(group >= 0) & (group < limit)]
            if len(done):
                whole = self.m.full(slot).copy()
                whole[done] = late.value[done]
                self.m.R[slot] = whole
                late.group[done] = -1
            if (late.group < 0).all():
                del self.slots[slot]

    def follow(self, to: int, slots: list[int], f: Callable[..., Any], lanes: Array) -> None:
        """Moves registers under way by f to `to`, which is written when they are.

        By the ISA nothing may read them before the wait (9.7.16.8.3). LLVM packs pairs of them
        ahead of it; ptxas makes one register of both, so that no instruction reads them there.
        """
        parts, group = [], np.full(self.m.size, -1)
        for slot in slots:
            part, late = self.m.full(slot), self.slots.get(slot)
            if late is not None:
                part = np.where(late.group >= 0, late.value, part)
                group = np.maximum(group, late.group)
            parts.append(part)
        value = f(*parts)
        group[np.isin(self.m.lanes, lanes, invert=True)] = -1
        self.slots[to] = Late(value, group)
        self.m.R[to] = np.where(group >= 0, value.dtype.type(2**63 - 1), value)
