"""mbarrier objects: what asynchronous work reports to, and threads poll (9.7.14.15)."""

from dataclasses import dataclass

import numpy as np

from .build import Build, Machine, Mask, Step, address_of, literal, opcode
from .errors import LaneError
from .ptx import Array, Instruction


@dataclass(slots=True)
class Mbarrier:
    """One object; a phase is complete when as many have arrived as were expected."""

    expected: int
    phase: int = 0
    """Number of phases that are complete."""
    arrived: int = 0


class Mbarriers:
    """All mbarriers of a machine, by thread block and address."""

    def __init__(self, m: Machine) -> None:
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

    def poll(self, lane: int, address: int, parity: int) -> bool:
        """True if the phase of this parity is complete; finishes the work that it waits for."""
        barrier = self.get(lane, address)
        if barrier.phase % 2 == parity:
            self.m.tensor.finish(lane, address)
        return barrier.phase % 2 != parity


def changes(m: Machine, mask: Mask, slot: int, offset: np.unsignedinteger, does: str) -> Array:
    """Units of the objects that the lanes make or end, which no other warp may be at."""
    lanes = m.index(mask)
    place = m.shared.place(lanes, m.addresses(slot, offset, mask), 8, does)
    units = m.shared.units(place, 8)
    m.shared.refuse_clashes(lanes, units, does)
    return units


def each(m: Machine, mask: Mask, slot: int, offset: np.unsignedinteger) -> list[tuple[int, int]]:
    """(lane, address) of each lane that takes part."""
    addresses = m.addresses(slot, offset, mask)
    return [(int(n), int(at)) for n, at in zip(m.index(mask), addresses)]


@opcode("mbarrier.init.shared::cta.b64")
def _init(b: Build, i: Instruction) -> Step:
    slot, offset = address_of(b, i.args[0], np.uint32)
    count = literal(i.args[1])

    def step(m: Machine, mask: Mask) -> None:
        m.shared.written(m.index(mask), changes(m, mask, slot, offset, "mbarrier.init changes"))
        for lane, address in each(m, mask, slot, offset):
            m.mbarriers.objects[int(m.block[lane]), address] = Mbarrier(count)

    return step


@opcode("mbarrier.inval.shared::cta.b64")
def _inval(b: Build, i: Instruction) -> Step:
    slot, offset = address_of(b, i.args[0], np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        changes(m, mask, slot, offset, "mbarrier.inval changes")
        for lane, address in each(m, mask, slot, offset):
            m.mbarriers.get(lane, address)
            del m.mbarriers.objects[int(m.block[lane]), address]

    return step


@opcode("mbarrier.try_wait.parity.shared::cta.b64", "mbarrier.try_wait.parity.shared.b64")
def _try_wait(b: Build, i: Instruction) -> Step:
    to, parity = i.args[0], b.slot(i.args[2], np.uint32)
    slot, offset = address_of(b, i.args[1], np.uint32)
    assert isinstance(to, int)

    def step(m: Machine, mask: Mask) -> None:
        lanes, done = m.index(mask), np.zeros(m.size, bool)
        parities = np.broadcast_to(m.R[parity], m.size)
        answers: dict[tuple[int, int, int], bool] = {}
        for lane, address in each(m, mask, slot, offset):
            key = (int(m.block[lane]), address, int(parities[lane]))
            if key not in answers:
                answers[key] = m.mbarriers.poll(lane, address, key[2])
            done[lane] = answers[key]
        place = m.shared.place(lanes, m.addresses(slot, offset, mask), 8, "polls")
        m.shared.reads(lanes, m.shared.units(place, 8))
        m.spinning[lanes] = ~done[lanes]
        m.put(to, done, mask)

    return step
