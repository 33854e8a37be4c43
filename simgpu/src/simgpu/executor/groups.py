"""Asynchronous work: cp.async (9.7.9.25.3) and wgmma (9.7.15.5) in commit groups, and mbarriers."""

from operator import attrgetter

import numpy as np

from simgpu.executor.build import Build, address_of, opcode, unknown
from simgpu.executor.errors import LaneError
from simgpu.executor.flight import Mbarrier
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import WARP, Array, Immediate, Instruction, literal
from simgpu.executor.state import Mask
from simgpu.executor.tensor import a_fragment, c_fragment, c_registers, product, read_operand

GROUP = 4 * WARP
"""Threads of a warp group."""


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
            words = m.memory.load(lanes[whole], addresses, np.dtype("u4"), size // 4)
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


@opcode("wgmma.mma_async.sync.aligned")
def _wgmma(b: Build, i: Instruction) -> Step:
    """wgmma.mma_async (9.7.15.5.2): D (registers) = A (registers or shared) B (shared) + D."""
    *_, shape, of_d, kind, of_b = i.mods
    columns = int(shape.partition("n")[2].partition("k")[0])
    if of_d != "f32" or kind not in ("bf16", "f16") or kind != of_b or not shape.endswith("k16"):
        raise unknown(i)
    d, in_registers = b.vector(i.args[0], np.uint32), not isinstance(i.args[1], int)
    a = b.vector(i.args[1], np.uint32 if in_registers else np.uint64)
    of, keep = b.slot(i.args[2], np.uint64), b.slot(i.args[3], bool)
    signs, transposes = i.args[4:6], i.args[6:]
    if any(sign != Immediate(1) for sign in signs):
        raise unknown(i)
    flips = [flag == Immediate(1) for flag in transposes]

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.index(mask)
        firsts = lanes[::GROUP]
        if len(lanes) % GROUP or (firsts % GROUP).any():
            raise LaneError(lanes[0], "wgmma by a part of a warp group")

        def operand(slot: int, size: int, flip: bool) -> Array:
            asked = m.full(slot)[firsts]
            return read_operand(m, firsts, asked, False, size, flip, kind, m.groups.read)

        if in_registers:
            left = a_fragment(m.rows(a, mask), kind).reshape(-1, 64, 16)
        else:
            assert a[0] is not None
            left = operand(a[0], 64, flips[0])
        right = operand(of, columns, flips[-1])
        before = c_fragment(m.late.newest(d, mask)).reshape(-1, 64, columns)
        kept = np.broadcast_to(m.R[keep], m.size)[firsts][:, None, None]
        result = product(left, right.swapaxes(1, 2), np.where(kept, before, np.float32(0)))
        rows = c_registers(result.reshape(-1, 16, columns))
        m.late.defer(d, rows, lanes, m.groups.group[lanes])

    return step


# --- mbarriers: what asynchronous work reports to, and threads poll (9.7.14.15) -------------------


@opcode("mbarrier.init.shared::cta.b64", "mbarrier.inval.shared::cta.b64")
def _change(b: Build, i: Instruction) -> Step:
    """Makes or ends objects, which no other warp may be at."""
    slot, offset = address_of(b, i.args[0], np.uint32)
    init, does = i.mods[1] == "init", f"mbarrier.{i.mods[1]} changes"

    def step(m: Machine, mask: Mask) -> None:
        lanes, objects = m.index(mask), m.mbarriers.objects
        place = m.shared.place(lanes, m.addresses(slot, offset, mask), 8, does)
        units = m.shared.units(place, 8)
        m.shared.refuse_clashes(lanes, units, does)
        if init:
            m.shared.written(lanes, units)
        for lane, address in m.each(mask, slot, offset):
            key = int(m.block[lane]), address
            if init:
                objects[key] = Mbarrier(literal(i.args[1]))
            else:
                m.mbarriers.get(lane, address)
                del objects[key]

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
        for lane, address in m.each(mask, slot, offset):
            key = (int(m.block[lane]), address, int(parities[lane]))
            if key not in answers:
                barrier = m.mbarriers.get(lane, address)
                if barrier.phase % 2 == key[2]:  # not complete: the work that it waits for is due
                    m.tensor.finish(lane, address)
                answers[key] = barrier.phase % 2 != key[2]
            done[lane] = answers[key]
        place = m.shared.place(lanes, m.addresses(slot, offset, mask), 8, "polls")
        m.shared.reads(lanes, m.shared.units(place, 8))
        m.spinning[lanes] = ~done[lanes]
        m.put(to, done, mask)

    return step
