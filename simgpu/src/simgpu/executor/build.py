"""From instructions to steps: closures that do on all lanes what one instruction says."""

from collections.abc import Callable
from typing import Any

import numpy as np

from simgpu.executor.errors import LaneError, UnknownPtxError
from simgpu.executor.flow import ranks
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import BOOL, Address, Immediate, Instruction, Name, Program, Vector
from simgpu.executor.state import Mask
from simgpu.executor.unwritten import followed, met, skipped, suspects, watched

Builder = Callable[["Build", Instruction], Step]
TABLE: dict[str, Builder] = {}
"""Opcode, or its first parts, -> what makes a step of it; the longest that fits counts."""

NAMED = (1 << 62) + (1 << 30)
"""Address of the first of a program's strings and parameters, the next one further each: no memory
is there."""


def opcode(*names: str) -> Callable[[Builder], Builder]:
    """Registers a builder for opcodes that begin with one of `names`."""

    def register(builder: Builder) -> Builder:
        TABLE.update(dict.fromkeys(names, builder))
        return builder

    return register


class Build:
    """Makes the steps of a program; numbers in the text become slots that hold them.

    With `follow` they follow what is read in a race, as if it had never been written.
    """

    def __init__(self, program: Program, follow: bool = False) -> None:
        self.program, self.follow = program, follow
        program.rank = ranks(program)
        self.named = [*program.strings, *dict(program.params)]
        self.suspects = set(range(len(program.dtypes))) if follow else suspects(program)
        self.constants: dict[tuple[int, Any], int] = {}
        self.here = 0
        """Number of the basic block that is being built."""
        self.parted: dict[int, tuple[int, list[int]]] = {}
        """Basic block with a followed branch -> where the ways meet, what is written between."""
        for number, block in enumerate(program.blocks if follow else ()):
            if block and block[-1].op.startswith("bra") and block[-1].guard is not None:
                found = skipped(program, number)
                if found is not None:
                    self.parted[number] = found
        self.blocks: list[list[Step]] = []
        for self.here, block in enumerate(program.blocks):
            steps = [self._step(instruction) for instruction in block]
            if not block or not ends(block[-1]):
                steps.append(lambda m, mask, after=self.here + 1: m.go(after, mask))
            for number, (meeting, slots) in self.parted.items():
                if meeting == self.here:
                    steps[0] = met(steps[0], program.blocks[number][-1].guard, slots)
            self.blocks.append(steps)

    def registers(self) -> list[Any]:
        """Slot -> value before the first instruction: None, but for constants."""
        values: list[Any] = [None] * len(self.program.dtypes)
        for (value, dtype), slot in self.constants.items():
            values[slot] = np.dtype(dtype).type(value)
        return values

    def slot(self, operand: Any, dtype: Any) -> int:
        """Slot of a register, or of a number of the given dtype."""
        if isinstance(operand, int):
            return operand
        if isinstance(operand, Name) and operand.text == "global_smem":
            operand = Immediate(0)
        if isinstance(operand, Name) and operand.text in self.named:
            operand = Immediate(NAMED + self.named.index(operand.text))
        if not isinstance(operand, Immediate):
            raise UnknownPtxError(f"operand {operand}")
        dtype = np.dtype(dtype)
        dtype = dtype if dtype == BOOL else np.dtype(f"u{dtype.itemsize}")
        bits = 1 if dtype == BOOL else 8 * dtype.itemsize
        value = abs(operand.value) % 2 if dtype == BOOL else operand.value % (1 << bits)
        key = (value, dtype.str)
        if key not in self.constants:
            self.constants[key] = len(self.program.dtypes)
            self.program.dtypes.append(dtype)
        return self.constants[key]

    def vector(self, operand: Any, dtype: Any) -> list[int | None]:
        """Slots of a list in braces, or of one register alone."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [None if item is None else self.slot(item, dtype) for item in items]

    def _step(self, instruction: Instruction) -> Step:
        parts = instruction.op.split(".")
        for length in range(len(parts), 0, -1):
            builder = TABLE.get(".".join(parts[:length]))
            if builder is not None:
                break
        else:
            raise unknown(instruction)
        step = builder(self, instruction)
        if ".sync" in instruction.op and not ends(instruction):
            step = _of_whole_warps(step, instruction.op.partition(".sync")[0])
        if instruction.guard is not None and parts[0] != "bra":
            step = _guarded(step, instruction.guard, instruction.negated)
        if self.follow and instruction.op.startswith("ld.global"):
            step = followed(step, instruction)
        if parts[0] == "bra" and self.here in self.parted:
            return step
        if self.suspects.isdisjoint(instruction.reads):
            return step
        return watched(step, instruction, self.suspects)


def address_of(b: Build, operand: object, dtype: type[np.unsignedinteger]) -> tuple[int, Any]:
    """Returns (register slot, offset) of a memory operand [register + offset]."""
    assert isinstance(operand, Address), operand
    base = b.slot(Immediate(0), dtype) if operand.base is None else operand.base
    dtype = b.program.dtypes[base].type
    return base, dtype(operand.offset % (1 << 8 * np.dtype(dtype).itemsize))


def unknown(instruction: Instruction) -> UnknownPtxError:
    what = " this form of atomics" if instruction.op.startswith(("atom", "red.")) else ""
    line = f"PTX line {instruction.line} ({instruction.source})"
    return UnknownPtxError(f"{line}: the executor does not know{what}: {instruction.text[:100]}")


def plain(dtypes: Any, result: Any, f: Callable[..., Any]) -> Builder:
    """Builder of a step that is one function for all lanes (9.4.1).

    The operands are the destination, then the sources, which are seen as `dtypes`, one of each or
    one of all. The result is of the dtype `result`; a destination that is wider is extended.
    """

    def build(b: Build, instruction: Instruction) -> Step:
        to, *args = instruction.args
        assert isinstance(to, int)
        each = dtypes if isinstance(dtypes, tuple) else (dtypes,) * len(args)
        slots = [b.slot(arg, dtype) for arg, dtype in zip(args, each, strict=True)]
        views = [_view(b.program.dtypes[slot], dtype) for slot, dtype in zip(slots, each)]
        out = b.program.dtypes[to]
        if out.itemsize != result.itemsize:
            widen = np.dtype(f"{result.kind}{out.itemsize}")
            return plain(dtypes, widen, lambda *x: f(*x).astype(widen))(b, instruction)
        cast = None if result == out else out

        def step(m: Machine, mask: Mask) -> None:
            R = m.R
            x = [R[s] if v is None else v(R[s]) for s, v in zip(slots, views)]
            y = f(*x)
            m.put(to, y if cast is None else y.view(cast), mask)

        return step

    return build


def _view(slot: np.dtype, dtype: np.dtype) -> Callable[[Any], Any] | None:
    """Returns the cast of a register to a `dtype` (9.4.1: low bits of a wider one), or None."""
    if slot == dtype:
        return None
    if slot.itemsize > dtype.itemsize:
        low = np.dtype(f"u{dtype.itemsize}")
        return lambda x: x.astype(low).view(dtype)
    if slot.itemsize < dtype.itemsize:
        raise UnknownPtxError(f"a register of {slot.itemsize} bytes read as {dtype}")
    return lambda x: x.view(dtype)


def ends(instruction: Instruction) -> bool:
    """True if an instruction says itself where its threads go next."""
    return instruction.op.startswith(("bra", "ret", "exit", "trap", "bar.sync", "barrier."))


def _of_whole_warps(inner: Step, name: str) -> Step:
    def step(m: Machine, mask: Mask) -> None:
        m.whole_warps(mask, f"{name}.sync")
        inner(m, mask)

    return step


def _guarded(inner: Step, guard: int, negated: bool) -> Step:
    def step(m: Machine, mask: Mask) -> None:
        any_, lanes = m.active(mask, guard, negated)
        if any_:
            inner(m, lanes)

    return step


# --- control flow ---------------------------------------------------------------------------------


@opcode("bra")
def _bra(b: Build, instruction: Instruction) -> Step:
    target, after = b.program.target(instruction), b.here + 1
    guard, negated = instruction.guard, instruction.negated

    if guard is None:
        return lambda m, mask: m.go(target, mask)

    def branch(m: Machine, mask: Mask) -> None:
        any_, lanes = m.active(mask, guard, negated)
        if any_:
            m.go(target, lanes)
            if lanes is mask or lanes is None:
                return
        assert lanes is not None or not any_
        rest = mask if lanes is None or not any_ else ~lanes if mask is None else mask & ~lanes
        if rest is None or rest.any():
            m.go(after, rest)

    return branch


@opcode("ret", "exit")
def _ret(b: Build, instruction: Instruction) -> Step:
    if instruction.guard is not None:
        raise unknown(instruction)

    def step(m: Machine, mask: Mask) -> None:
        m.exited[m.index(mask)] = True

    return step


@opcode("trap")
def _trap(b: Build, instruction: Instruction) -> Step:
    """Ends the kernel with a fault; compilers also put it where nothing should ever come."""

    def step(m: Machine, mask: Mask) -> None:
        raise LaneError(m.index(mask)[0], "trap")

    return step


@opcode("call.uni")
def _call(b: Build, instruction: Instruction) -> Step:
    """A call of __assertfail, the only function that is known: a fault with the message."""
    if Name("__assertfail") not in instruction.args:
        raise unknown(instruction)
    texts = list(b.program.strings.values())

    def step(m: Machine, mask: Mask) -> None:
        lane = m.index(mask)[0]
        message, file, line = (m.outgoing.get(f"param{i}", -1) for i in range(3))
        what, where = (
            texts[x - NAMED].strip("\0") if 0 <= x - NAMED < len(texts) else "?"
            for x in (message, file)
        )
        raise LaneError(lane, f"the assertion {what!r} of {where}:{line} failed")

    return step


@opcode("bar.sync", "barrier.sync")
def _barrier(b: Build, instruction: Instruction) -> Step:
    """bar.sync 0 (9.7.14.1): all threads of the block wait for each other."""
    if instruction.args != [Immediate(0)] or instruction.guard is not None:
        raise unknown(instruction)
    after = b.here + 1
    return lambda m, mask: m.arrive(mask, after)
