"""The machine: thread blocks that run a program in lockstep, one array lane a thread.

The group of threads that is furthest behind runs first, one basic block at a time, so that threads
that took different branches meet again as early as they can: see `flow`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from simgpu.executor.errors import FaultError, LaneError
from simgpu.executor.flight import Copies, LateRegisters, Mbarriers, TensorMemories, WarpGroups
from simgpu.executor.memory import GlobalMemory, smallest_access
from simgpu.executor.ptx import WARP, Array, Instruction, Program
from simgpu.executor.shared import SharedMemory
from simgpu.executor.state import LaneState, Mask

Step = Callable[["Machine", Mask], None]
"""Function that carries out one instruction on the lanes that take part."""


class Machine(LaneState):
    """Some thread blocks of one launch.

    Args:
        program: the kernel.
        steps: what each instruction of each basic block does.
        registers: slot -> value before the first instruction.
        params: values of the parameters, as numpy scalars.
        grid: thread blocks in x, y and z.
        threads: threads of a block.
        blocks: which thread blocks run here, as linear numbers, x fastest.
        shared: bytes of shared memory of a block.
        memory: global memory.
    """

    def __init__(
        self, program: Program, steps: list[list[Step]], registers: list[Any], *,
        params: dict[str, Any], grid: tuple[int, int, int], threads: int, blocks: Array,
        shared: int, memory: GlobalMemory,
    ) -> None:  # fmt: skip
        super().__init__(program, registers, threads, blocks)
        self.steps, self.params, self.memory, memory.m = steps, params, memory, self
        self.rank = program.rank
        self.shared = SharedMemory(self, shared, smallest_access(program, "shared"))
        self.copies, self.late = Copies(self, self.shared), LateRegisters(self)
        self.groups = WarpGroups(self, self.shared, self.late)
        self.mbarriers = Mbarriers(self)
        self.tensor = TensorMemories(self, self.mbarriers)
        self._special(grid)
        self.outgoing: dict[str, int] = {}
        """Parameters of the next call, of its first lane: they are only shown."""
        self.exited = np.zeros(self.size, bool)
        self.waiting = np.full(self.size, -1)
        """Lane -> basic block where it goes on after the barrier at which it waits; -1 if none."""
        self.fronts: dict[int, Mask] = {0: None}
        """Basic block -> lanes that are about to run it."""

    def _special(self, grid: tuple[int, int, int]) -> None:
        x, y, z = grid
        values = {
            "%tid.x": self.tid, "%laneid": self.tid % WARP, "%ctaid.x": self.cta % x,
            "%ctaid.y": self.cta // x % y, "%ctaid.z": self.cta // (x * y),
            "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z,
        }  # fmt: skip
        for name, value in values.items():
            self.R[self.program.slots[name]] = np.uint32(value)

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
        while self.fronts:
            number = self._next()
            mask = self.fronts.pop(number)
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
        if not self.exited.all():
            raise self._deadlock()
        left = self.tensor.left_over()
        if left is not None:
            raise FaultError(f"{self.program.name}: {left}")

    def _next(self) -> int:
        """The first basic block with a lane that does not poll in vain."""
        if not self.spinning.any():
            return min(self.fronts, key=self.rank.__getitem__)
        able = [n for n, lanes in self.fronts.items() if not self.spinning[self.index(lanes)].all()]
        if not able:
            raise self._deadlock()
        return min(able, key=self.rank.__getitem__)

    def arrive(self, mask: Mask, then: int) -> None:
        """Lanes wait at the block's barrier 0; all of a block having come, they go on."""
        self.whole_warps(mask, "divergent barrier")
        if mask is None:
            self.meet(None)
            self.go(then, None)
            return
        self.waiting[mask] = then
        whole = (self.waiting >= 0).reshape(-1, self.threads).all(1)
        if not whole.any():
            return
        self.meet(whole)
        released = np.repeat(whole, self.threads)
        for block in np.unique(self.waiting[released]):
            self.go(int(block), released & (self.waiting == block))
        self.waiting[released] = -1

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
