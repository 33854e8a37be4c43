"""The machine: thread blocks that run a program in lockstep, one array lane a thread.

The group of threads with the lowest program counter runs first, one basic block at a time, so
that threads that took different branches meet again as early as they can. A register is an array
over all lanes, or a numpy scalar while all lanes agree; None is one that was never written.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .build import WARP, Build, Mask
from .counters import Counters
from .errors import FaultError, LaneError
from .flight import Copies, LateRegisters
from .mbarrier import Mbarriers
from .memory import GlobalMemory, smallest_access
from .ptx import Array, Instruction
from .shared import SharedMemory
from .tcgen05 import TensorMemories
from .unwritten import BITS, BOTH
from .wgmma import WarpGroups


class Machine:
    """Some thread blocks of one launch.

    Args:
        build: the kernel, and what each of its instructions does.
        params: values of the parameters, as numpy scalars.
        grid: thread blocks in x, y and z.
        threads: threads of a block.
        blocks: which thread blocks run here, as linear numbers, x fastest.
        shared: bytes of shared memory of a block.
        memory: global memory.
        counters: what counts instructions and memory accesses, if anything does.
    """

    def __init__(
        self,
        build: Build,
        *,
        params: dict[str, Any],
        grid: tuple[int, int, int],
        threads: int,
        blocks: Array,
        shared: int,
        memory: GlobalMemory,
        counters: Counters | None = None,
    ) -> None:
        self.program, self.steps = build.program, build.blocks
        self.params, self.memory, self.counters = params, memory, counters
        self.threads, self.warps = threads, threads // WARP
        self.size = len(blocks) * threads
        self.lanes = np.arange(self.size)
        self.block = np.repeat(np.arange(len(blocks)), threads)
        """Lane -> number of its thread block in this machine."""
        self.cta = np.repeat(blocks, threads)
        """Lane -> number of its thread block in the grid."""
        self.tid = self.lanes % threads
        self.warp = self.tid // WARP
        unit = smallest_access(self.program, "shared")
        self.shared = SharedMemory(self, len(blocks), shared, unit)
        self.copies, self.late = Copies(self), LateRegisters(self)
        self.groups, self.mbarriers = WarpGroups(self), Mbarriers(self)
        self.tensor = TensorMemories(self, len(blocks))
        self.R = build.registers()
        self.unwritten: dict[int, Array] = {}
        """Slot -> lanes that never wrote it, as marks: see `unwritten`."""
        self._special(grid)
        self.exited = np.zeros(self.size, bool)
        self.waiting = np.full(self.size, -1)
        """Lane -> basic block where it goes on after the barrier at which it waits; -1 if none."""
        self.spinning = np.zeros(self.size, bool)
        """Lanes that polled an mbarrier in vain since the last thing that could complete it."""
        self.fronts: dict[int, Mask] = {0: None}
        """Basic block -> lanes that are about to run it."""

    def _special(self, grid: tuple[int, int, int]) -> None:
        x, y, _ = grid
        values = {
            "%tid.x": self.tid, "%laneid": self.tid % WARP,
            "%ctaid.x": self.cta % x, "%ctaid.y": self.cta // x % y,
            "%ctaid.z": self.cta // (x * y),
        }  # fmt: skip
        for name, value in values.items():
            self.R[self.program.slots[name]] = value.astype(np.uint32)
        for axis, size in zip("xyz", grid):
            self.R[self.program.slots[f"%nctaid.{axis}"]] = np.uint32(size)

    # --- lanes ------------------------------------------------------------------------------------

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
            self.unwritten[slot] = np.where(mask, np.uint8(0), BOTH)
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
        """Raises unless a warp's threads take part together, as `.aligned` and -1 masks ask for."""
        if mask is not None:
            counts = mask.reshape(-1, WARP).sum(1)
            broken = np.flatnonzero((counts > 0) & (counts < WARP))
            if len(broken):
                raise LaneError(broken[0] * WARP, f"{what}: only {counts[broken[0]]} of 32 threads")

    # --- control flow -----------------------------------------------------------------------------

    def go(self, block: int, mask: Mask) -> None:
        """Lanes are to run a basic block next."""
        if mask is not None and block in self.fronts:
            other = self.fronts[block]
            mask = None if other is None or (mask | other).all() else mask | other
        self.fronts[block] = mask

    def run(self) -> None:
        """Runs all blocks to their end.

        Raises:
            FaultError: the first thing that is wrong.
        """
        while self.fronts or self._wakes():
            number = self._next()
            mask = self.fronts.pop(number)
            if self.counters is not None:
                self.counters.enter(number, self._warps_in(mask))
            at = 0
            try:
                for step in self.steps[number]:
                    step(self, mask)
                    at += 1
            except LaneError as trouble:
                instruction = self.program.blocks[number][at]
                raise self._fault(instruction, trouble.lane, str(trouble)) from None
            except Exception as error:
                i = self.program.blocks[number][at]
                error.add_note(f"{self.program.name}, PTX line {i.line}: {i.text}")
                self._unwritten(i, mask)
                raise
        left = self.tensor.left_over()
        if left is not None:
            raise FaultError(f"{self.program.name}: {left}")

    def _next(self) -> int:
        """The first basic block of those whose lanes do not all poll in vain."""
        if not self.spinning.any():
            return min(self.fronts)
        able = [n for n, lanes in self.fronts.items() if not self.spinning[self.index(lanes)].all()]
        if not able:
            raise self._deadlock()
        return min(able)

    def _warps_in(self, mask: Mask) -> int:
        if mask is None:
            return self.size // WARP
        return int(np.count_nonzero(mask.reshape(-1, WARP).any(1)))

    def arrive(self, mask: Mask, then: int) -> None:
        """Lanes wait at the block's barrier 0; all of a block having come, they go on."""
        self.whole_warps(mask, "divergent barrier")
        if mask is None:
            self.shared.barrier(None)
            self.go(then, None)
            return
        self.waiting[mask] = then
        whole = (self.waiting >= 0).reshape(-1, self.threads).all(1)
        if not whole.any():
            return
        self.shared.barrier(whole)
        released = np.repeat(whole, self.threads)
        for block in np.unique(self.waiting[released]):
            self.go(int(block), released & (self.waiting == block))
        self.waiting[released] = -1

    def _wakes(self) -> bool:
        """False: every lane has exited. Raises where some wait and nobody is left to come."""
        if self.exited.all():
            return False
        raise self._deadlock()

    def _deadlock(self) -> FaultError:
        """The fault of waiting for ever, with what each warp of the first such block does."""
        first = int(np.flatnonzero(~self.exited)[0]) // self.threads * self.threads
        stands = []
        for number, lane in enumerate(range(first, first + self.threads, WARP)):
            does = "waits at a barrier" if self.waiting[lane] >= 0 else "polls an mbarrier"
            stands.append(f"warp {number} {'has exited' if self.exited[lane] else does}")
        return FaultError(
            f"{self.program.name}: deadlock in block {self.cta[first]}: {', '.join(stands)}"
        )

    # --- faults -----------------------------------------------------------------------------------

    def _fault(self, instruction: Instruction, lane: int, what: str) -> FaultError:
        return FaultError(
            f"{self.program.name}: {what}; block {self.cta[lane]}, thread {self.tid[lane]}, "
            f"PTX line {instruction.line} ({instruction.source}): {instruction.text[:100]}"
        )

    def _unwritten(self, instruction: Instruction, mask: Mask) -> None:
        """Raises if an instruction failed because it read a register that was never written."""
        missing = [slot for slot in instruction.reads if self.R[slot] is None]
        if missing:
            names = {slot: name for name, slot in self.program.slots.items()}
            what = f"reads {', '.join(names[slot] for slot in missing)}, which was never written"
            raise self._fault(instruction, int(self.index(mask)[0]), what)
