"""Tensor memory of the thread blocks (9.7.16.1), and the products into it that are under way."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from simgpu.executor.errors import LaneError
from simgpu.executor.flight import Mbarriers
from simgpu.executor.ptx import Array
from simgpu.executor.state import LaneState

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
