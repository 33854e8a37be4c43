"""Asynchronous work: copies to shared memory, products, registers that will be written later.

Nothing asynchronous happens before something waits for it, as late as the ISA allows. Code that
waits too little meets memory that is still being copied to, or registers that hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from simgpu.executor.errors import LaneError
from simgpu.executor.ptx import Array
from simgpu.executor.shared import COMING, SharedMemory
from simgpu.executor.state import LaneState, Mask

NAN = np.uint32(0x7FFF_FFFF)


# --- copies ---------------------------------------------------------------------------------------


class Copies:
    """All cp.async under way in a machine: bytes that will arrive in shared memory."""

    def __init__(self, m: LaneState, shared: SharedMemory) -> None:
        self.m, self.shared = m, shared
        self.pending: list[tuple[Array, Array, Array, Array]] = []
        """Lanes, the byte offset of each one's destination, data (lanes, bytes), commit group."""
        self.group = np.zeros(m.size, np.int32)
        """Number of groups that each lane has committed."""

    def start(self, lanes: Array, offset: Array, data: Array) -> None:
        """Bytes (lanes, bytes) are on their way to shared memory."""
        shared = self.shared
        units = shared.units(offset, data.shape[1])
        shared.refuse_clashes(lanes, units, "copies to")
        shared.state[units] = COMING
        self.pending.append((lanes, offset, data, self.group[lanes]))

    def wait(self, lanes: Array, allowed: int) -> None:
        """Copies of these lanes arrive, but not those in the last `allowed` groups."""
        waiting = np.zeros(self.m.size, bool)
        waiting[lanes] = True
        limit, pending, shared = self.group - allowed, self.pending, self.shared
        self.pending = []
        for who, offset, data, group in pending:
            done = waiting[who] & (group < limit[who])
            if done.any():
                arriving, size = offset[done], data.shape[1]
                shared.data[arriving[:, None] + np.arange(size)] = data[done]
                shared.written(who[done], shared.units(arriving, size))
            if not done.all():
                self.pending.append((who[~done], offset[~done], data[~done], group[~done]))


# --- registers ------------------------------------------------------------------------------------


class LateRegisters:
    """Registers that instructions under way will write; until then they hold NaN."""

    def __init__(self, m: LaneState) -> None:
        self.m = m
        self.slots: dict[int, tuple[Array, Array]] = {}
        """Slot -> the value and the commit group of each lane; -1 where nothing is under way."""

    def defer(self, slots: list[int | None], rows: Array, lanes: Array, group: Array) -> None:
        """Registers will have the values (registers, lanes) when their groups are waited for."""
        for slot, row in zip(slots, rows):
            if slot is None:
                continue
            new = np.zeros(self.m.size, np.uint32), np.full(self.m.size, -1)
            values, groups = self.slots.setdefault(slot, new)
            values[lanes], groups[lanes] = row, group
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
            if slot in self.slots:
                values, groups = self.slots[slot]
                row[:] = np.where(groups[lanes] >= 0, values[lanes], row)
        return rows

    def settle(self, lanes: Array, limit: Array) -> None:
        """Registers of groups below `limit` (lanes,) are written."""
        for slot, (values, groups) in list(self.slots.items()):
            group = groups[lanes]
            done = lanes[(group >= 0) & (group < limit)]
            if len(done):
                whole = self.m.full(slot).copy()
                whole[done] = values[done]
                self.m.R[slot] = whole
                groups[done] = -1
            if (groups < 0).all():
                del self.slots[slot]


# --- products -------------------------------------------------------------------------------------


class WarpGroups:
    """The products under way in a machine; their results are in `late`."""

    def __init__(self, m: LaneState, shared: SharedMemory, late: LateRegisters) -> None:
        self.m, self.shared, self.late = m, shared, late
        self.group = np.zeros(m.size, np.int32)
        """Number of groups that each lane has committed."""
        self.pins: list[tuple[Array, Array, Array]] = []
        """(first lanes of warp groups, units, commit groups): what products under way read."""

    def read(self, lanes: Array, units: Array) -> None:
        """Products that the lanes asked for read units of shared memory, until they are done."""
        self.shared.async_reads(lanes, units, "wgmma")
        self.shared.pinned[units] += 1  # once, however often one product reads it
        self.pins.append((lanes, units, self.group[lanes]))

    def wait(self, lanes: Array, allowed: int) -> None:
        """Products of these lanes are done, but not those in the last `allowed` groups."""
        limit = self.group[lanes] - allowed
        self.late.settle(lanes, limit)
        bound = np.full(self.m.size, -1)
        bound[lanes] = limit
        left = []
        for firsts, units, group in self.pins:
            done = bound[firsts] > group
            self.shared.pinned[units[..., done]] -= 1
            if not done.all():
                left.append((firsts[~done], units[..., ~done], group[~done]))
        self.pins = left


# --- mbarriers ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Mbarrier:
    """One object; a phase is complete when as many have arrived as were expected."""

    expected: int
    phase: int = 0
    """Number of phases that are complete."""
    arrived: int = 0


class Mbarriers:
    """All mbarriers of a machine, by thread block and address."""

    def __init__(self, m: LaneState) -> None:
        self.m = m
        self.objects: dict[tuple[int, int], Mbarrier] = {}

    def get(self, lane: int, address: int) -> Mbarrier:
        """The object at an address of the lane's block; a fault if there is none."""
        found = self.objects.get((int(self.m.block[lane]), address))
        if found is None:
            raise LaneError(lane, f"uses shared memory at {address}, which is no mbarrier")
        return found

    def arrive(self, lane: int, address: int) -> None:
        """One arrival."""
        barrier = self.get(lane, address)
        barrier.arrived += 1
        if barrier.arrived == barrier.expected:
            barrier.phase, barrier.arrived = barrier.phase + 1, 0
            self.m.spinning[:] = False


# --- tensor memory (9.7.16.1), and the products into it -------------------------------------------

LANES, COLUMNS = 128, 512
Cells = tuple[Array, Array]
"""Lanes and columns of tensor memory, as an index."""


@dataclass(slots=True)
class TensorMemory:
    """Tensor memory of one thread block (9.7.16.1), in cells of 32 bits."""

    cells: Array = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.uint32))
    storing: Array = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.uint8))
    """Cells that a tcgen05.st under way writes: number of its warp, from 1."""
    loading: Array = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.uint8))
    """Cells that a tcgen05.ld under way reads: a bit for each warp that may access the lane."""
    allocated: dict[int, int] = field(default_factory=dict)
    """First column -> number of columns."""
    queue: list[Callable[[], None] | int] = field(default_factory=list)
    """Products under way, and at each commit the address of its mbarrier."""

    users: dict[int, int] = field(default_factory=dict)
    """Warp -> number of barriers of the thread block before its last tcgen05.ld or st."""

    def check(self, lane: np.integer, first: int, last: int) -> None:
        """A fault unless the columns from `first` to before `last` are allocated."""
        taken = self.allocated.items()
        if not any(start <= first and last <= start + width for start, width in taken):
            what = f"accesses columns {first} to {last - 1} of tensor memory, not allocated"
            raise LaneError(lane, what)

    def reads(self, lane: np.integer, who: str, cells: Cells) -> None:
        """A fault if a tcgen05.st to cells that are read is still under way (9.7.16.8.5)."""
        if self.storing[cells].any():
            raise LaneError(lane, f"{who} reads tensor memory before tcgen05.wait::st")

    def writes(self, lane: np.integer, who: str, cells: Cells) -> None:
        """A fault if a tcgen05.ld of cells that are written is still under way (9.7.16.8.5)."""
        if self.loading[cells].any():
            raise LaneError(lane, f"{who} writes what a tcgen05.ld reads, before tcgen05.wait::ld")


class TensorMemories:
    """Tensor memory of all thread blocks of a machine."""

    def __init__(self, m: LaneState, mbarriers: Mbarriers) -> None:
        self.m, self.mbarriers = m, mbarriers
        used = any(i.op.startswith("tcgen05") for i in m.program.instructions)
        self.blocks = [TensorMemory() for _ in range(len(m.epoch) if used else 0)]

    def of(self, lane: int | np.integer) -> TensorMemory:
        """The memory of the lane's thread block."""
        return self.blocks[self.m.block[lane]]

    def finish(self, lane: int, address: int) -> None:
        """Carries out the products up to the next commit to an mbarrier, if there is one."""
        queue = self.of(lane).queue if self.blocks else []
        if address not in queue:
            return
        count = queue.index(address) + 1
        for item in queue[:count]:
            if isinstance(item, int):
                self.mbarriers.arrive(lane, item)
            else:
                item()
        del queue[:count]

    def left_over(self) -> str | None:
        """Says what thread blocks that have exited should have waited for or given back."""
        for memory in self.blocks:
            if any(not isinstance(item, int) for item in memory.queue):
                return "a thread block exits with a tcgen05.mma under way"
            if memory.allocated:
                return "a thread block exits without tcgen05.dealloc"
        return None
