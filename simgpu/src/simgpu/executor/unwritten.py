"""Registers that were never written, in some lanes or in all, and what may be done with them.

LLVM leaves undefined what no result depends on: one half of a pair, or what a predicated load did
not fetch. Such values may be moved and computed with; an address, a branch, a store or a matrix
product that depends on one is a fault.

`suspects` finds before the run the few registers that may hold any: those that are not written on
every path to a use, and what is computed from them. Only instructions that read one are watched.
"""

from collections.abc import Iterable

import numpy as np

from simgpu.executor.errors import LaneError
from simgpu.executor.flow import successors
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import SPECIAL, Array, Immediate, Instruction, Program, Vector
from simgpu.executor.state import BITS, WHOLE, Mask

COMPUTES = ("mov", "selp", "shfl", "redux", "cvt", "add", "sub", "mul", "mad", "fma", "max",
            "min", "neg", "abs", "and", "or", "xor", "not", "popc", "shl", "shr", "bfe", "prmt",
            "ex2", "lg2", "rcp", "sqrt", "rsqrt", "div", "rem", "tanh", "setp", "cvta")  # fmt: skip
"""Instructions that hand undefined values on."""


def suspects(program: Program) -> set[int]:
    """Slots that may hold what was never written, where an instruction reads them."""
    found: set[int] = set()
    for block, defined in zip(program.blocks, _defined(program)):
        for i in block if defined is not None else ():
            assert defined is not None
            found.update(slot for slot in i.reads if slot not in defined)
            if i.guard is None:
                defined.update(i.writes)
    before = -1
    while len(found) > before:
        before = len(found)
        for i in program.instructions:
            if i.mods[0] in COMPUTES and not found.isdisjoint(i.reads):
                found.update(i.writes)
    return found


def _defined(program: Program) -> list[set[int] | None]:
    """Slots written on every path to each basic block; None for a block that is never reached."""
    written = [
        {slot for i in block if i.guard is None for slot in i.writes} for block in program.blocks
    ]
    before: list[set[int] | None] = [None] * len(program.blocks)
    before[0] = {program.slots[name] for name in SPECIAL}
    todo = [0]
    while todo:
        number = todo.pop()
        now = before[number]
        assert now is not None
        now = now | written[number]
        for successor in successors(program, number):
            old = before[successor]
            new = now if old is None else old & now
            if new != old:
                before[successor] = new
                todo.append(successor)
    return [None if slots is None else set(slots) for slots in before]


def watched(step: Step, i: Instruction, suspicious: set[int]) -> Step:
    """The step, with what it reads and writes checked for values that were never written."""
    of = [slot for slot in dict.fromkeys(i.reads) if slot in suspicious]
    hands_on = i.mods[0] in COMPUTES and i.guard is None

    def checked(m: Machine, mask: Mask) -> None:
        for slot in of:
            if m.R[slot] is None:
                m.R[slot] = m.program.dtypes[slot].type(BITS[m.program.dtypes[slot].itemsize])
                m.unwritten[slot] = np.full(m.size, WHOLE)
        if not any(slot in m.unwritten for slot in of):
            step(m, mask)
        elif hands_on:
            marks = _handed_on(m, mask, step, i)
            step(m, mask)
            for slot in i.writes:
                _mark(m, mask, slot, marks[slot])
        else:
            if i.guard in of:
                _refuse(m, mask, [i.guard])
            some, lanes = (True, mask) if i.guard is None else m.active(mask, i.guard, i.negated)
            if some:
                _refuse(m, lanes, of)
            step(m, mask)

    return checked


def followed(step: Step, i: Instruction) -> Step:
    """A load: in lanes that are in a race, its registers are as if never written."""

    def load(m: Machine, mask: Mask) -> None:
        m.memory.torn = torn = np.zeros(m.size, bool)
        step(m, mask)
        m.memory.torn = None
        if torn.any():
            _add(m, i.writes, torn)

    return load


def skipped(program: Program, number: int) -> tuple[int, list[int]] | None:
    """Where the ways meet again that the branch at the end of a basic block parts, if it does so.

    Returns:
        tuple[int, list[int]] | None: that basic block, and the slots that are written between. The
            branch matters to those alone: see `met`. None if anything else is done between.
    """
    rank, guard = program.rank, program.blocks[number][-1].guard
    ways, slots = set(successors(program, number)), set()
    while len(ways) > 1:
        first = min(ways, key=rank.__getitem__)
        after = successors(program, first)
        ways = ways - {first} | set(after)
        if not after or min(rank[n] for n in after) <= rank[first]:  # an end, or a loop
            return None
        for i in program.blocks[first]:
            if i.mods[0] in ("shfl", "redux") or i.mods[0] not in (*COMPUTES, "bra"):
                return None
            slots.update(i.writes)
    (meeting,) = ways
    return None if guard in slots or rank[meeting] <= rank[number] else (meeting, sorted(slots))


def met(step: Step, guard: int, slots: list[int]) -> Step:
    """The step where ways meet again that a branch on `guard` parted: see `skipped`."""

    def after(m: Machine, mask: Mask) -> None:
        if guard in m.unwritten:
            torn = m.unwritten[guard] != 0
            _add(m, slots, torn if mask is None else torn & mask)
        step(m, mask)

    return after


def _add(m: Machine, slots: Iterable[int], torn: Array) -> None:
    """Marks registers of lanes as never written, beside those that are marked."""
    for slot in slots:
        m.unwritten[slot] = np.where(torn, WHOLE, m.unwritten.get(slot, np.uint8(0)))


def _refuse(m: Machine, mask: Mask, slots: list[int]) -> None:
    for slot in slots:
        holes = m.unwritten.get(slot, np.zeros(m.size, np.uint8))
        wrong = np.flatnonzero(holes if mask is None else holes * mask)
        if len(wrong):
            names = {number: name for name, number in m.program.slots.items()}
            raise LaneError(wrong[0], f"depends on {names[slot]}, which was never written")


def _mark(m: Machine, mask: Mask, slot: int, marks: Array) -> None:
    if mask is not None:
        marks = np.where(mask, marks, m.unwritten.get(slot, np.uint8(0)))
    if marks.any():
        m.unwritten[slot] = marks
    else:
        m.unwritten.pop(slot, None)


def _handed_on(m: Machine, mask: Mask, step: Step, i: Instruction) -> dict[int, Array]:
    """Slot -> marks of the registers that an instruction writes, by the marks of what it reads."""
    to, *args = i.args
    none = np.zeros(m.size, np.uint8)
    marks = {slot: m.unwritten.get(slot, none) for slot in i.reads}
    both = np.bitwise_or.reduce(list(marks.values()))
    low, high = (both & 3) != 0, both >= 4
    halves = low * WHOLE, high * WHOLE
    if isinstance(to, Vector):  # a register taken apart, or a predicate for each half
        return {slot: half for slot, half in zip(to.items, halves) if isinstance(slot, int)}
    assert isinstance(to, int)
    if i.op == "cvt.u32.u64":
        return {to: halves[0]}
    if i.mods[0] == "mov" and isinstance(args[0], Vector):  # two put together
        low, high = (marks[x] if isinstance(x, int) else none for x in args[0].items)
        return {to: _of_halves(low != 0, high != 0)}
    if i.op == "prmt.b32" and isinstance(args[2], Immediate):
        first, second = (marks[x] if isinstance(x, int) else none for x in args[:2])
        of, selector = first | second << 4, args[2].value
        chosen = [(of >> (selector >> 4 * k & 7) & 1) << k for k in range(4)]
        return {to: np.bitwise_or.reduce(chosen)}
    if i.mods[0] == "selp":
        first, second, predicate = (marks[x] if isinstance(x, int) else none for x in args)
        assert isinstance(args[2], int)
        chosen = np.where(np.broadcast_to(m.R[args[2]], m.size), first, second)
        return {to: chosen | predicate}
    if i.mods[0] in ("shfl", "redux"):
        return {to: _moved(m, mask, step, to, args[0], marks)}
    return {to: _of_halves(low, high) if i.type.endswith("x2") else (both != 0) * WHOLE}


def _of_halves(low: Array, high: Array) -> Array:
    return low * np.uint8(3) | high * np.uint8(12)


def _moved(
    m: Machine, mask: Mask, step: Step, to: int, of: object, marks: dict[int, Array]
) -> Array:
    """Marks that go the way of the values: the instruction itself is run on them."""
    assert isinstance(of, int)
    value, result = m.R[of], m.R[to]
    m.R[of] = np.where(marks[of] != 0, np.float32(1), np.float32(0)).view(np.uint32)
    step(m, mask)
    moved = m.full(to)
    m.R[of], m.R[to] = value, result
    return (moved != 0) * WHOLE
