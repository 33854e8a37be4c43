"""mbarrier objects: what asynchronous work reports to, and threads poll (9.7.14.15)."""

import numpy as np

from simgpu.executor.build import Build, address_of, opcode
from simgpu.executor.flight import Mbarrier
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import Array, Instruction, literal
from simgpu.executor.state import Mask


def changes(m: Machine, mask: Mask, slot: int, offset: np.unsignedinteger, does: str) -> Array:
    """Units of the objects that the lanes make or end, which no other warp may be at."""
    lanes = m.index(mask)
    place = m.shared.place(lanes, m.addresses(slot, offset, mask), 8, does)
    units = m.shared.units(place, 8)
    m.shared.refuse_clashes(lanes, units, does)
    return units


@opcode("mbarrier.init.shared::cta.b64")
def _init(b: Build, i: Instruction) -> Step:
    slot, offset = address_of(b, i.args[0], np.uint32)
    count = literal(i.args[1])

    def step(m: Machine, mask: Mask) -> None:
        m.shared.written(m.index(mask), changes(m, mask, slot, offset, "mbarrier.init changes"))
        for lane, address in m.each(mask, slot, offset):
            m.mbarriers.objects[int(m.block[lane]), address] = Mbarrier(count)

    return step


@opcode("mbarrier.inval.shared::cta.b64")
def _inval(b: Build, i: Instruction) -> Step:
    slot, offset = address_of(b, i.args[0], np.uint32)

    def step(m: Machine, mask: Mask) -> None:
        changes(m, mask, slot, offset, "mbarrier.inval changes")
        for lane, address in m.each(mask, slot, offset):
            m.mbarriers.get(lane, address)
            del m.mbarriers.objects[int(m.block[lane]), address]

    return step


def polled(m: Machine, lane: int, address: int, parity: int) -> bool:
    """True if the phase of this parity is complete; finishes the work that it waits for."""
    barrier = m.mbarriers.get(lane, address)
    if barrier.phase % 2 == parity:
        m.tensor.finish(lane, address)
    return barrier.phase % 2 != parity


@opcode("mbarrier.try_wait.parity.shared::cta.b64", "mbarrier.try_wait.parity.shared.b64")
def _try_wait(b: Build, i: Instruction) -> Step:
    to, parity = i.args[0], b.slot(i.args[2], np.uint32)
    slot, offset = address_of(b, i.args[1], np.uint32)
    assert isinstance(to, int)

    def step(m: Machine, mask: Mask) -> None:
        lanes, done = m.index(mask), np.zeros(m.size, bool)
        parities = np.broadcast_to(m.R[parity], m.size)
        answers: dict[tuple[int, int, int], bool] = {}
        for lane, address in m.each(mask, slot, offset):
            key = (int(m.block[lane]), address, int(parities[lane]))
            if key not in answers:
                answers[key] = polled(m, lane, address, key[2])
            done[lane] = answers[key]
        place = m.shared.place(lanes, m.addresses(slot, offset, mask), 8, "polls")
        m.shared.reads(lanes, m.shared.units(place, 8))
        m.spinning[lanes] = ~done[lanes]
        m.put(to, done, mask)

    return step
