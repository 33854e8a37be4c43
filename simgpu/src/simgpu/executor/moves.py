"""Moves and conversions (9.7.9): mov, packing, cvt, parameters, loads and stores."""

import functools
from collections.abc import Callable
from operator import or_
from typing import Any

import numpy as np

from simgpu.executor.build import NAMED, Build, address_of, opcode, plain, unknown
from simgpu.executor.formats import F32, F64, flushed, from_bf16, joined, to_bf16, to_half
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import CLASSES, TYPES, U32, Address, Instruction, Name, Vector
from simgpu.executor.state import Mask


@opcode("mov")
def _mov(b: Build, instruction: Instruction) -> Step:
    """A move, or packing and unpacking by braces (9.7.9.5)."""
    to, source = instruction.args
    dtype = TYPES["pred" if instruction.type == "pred" else f"b{instruction.type[1:]}"]
    if isinstance(to, Vector) or isinstance(source, Vector):
        return _packed(b, instruction, to, source, dtype)
    if isinstance(source, Name) and source.text not in ("global_smem", *b.named):
        raise unknown(instruction)
    return plain(dtype, dtype, lambda x: x[()])(b, instruction)  # of None a TypeError


def _packed(b: Build, instruction: Instruction, to: Any, source: Any, dtype: np.dtype) -> Step:
    """Packs several registers into one, the lowest first, or the reverse."""
    packs = isinstance(source, Vector)
    count = len((source if packs else to).items)
    part, whole = np.dtype(f"u{dtype.itemsize // count}"), b.slot(to if packs else source, dtype)
    slots = b.vector(source if packs else to, part)
    if packs and None in slots:  # "_" takes no bits from anywhere
        raise unknown(instruction)
    shifts = (dtype.type(8 * part.itemsize * i) for i in range(count))
    parts = [(x, shift) for x, shift in zip(slots, shifts) if x is not None]

    def step(m: Machine, mask: Mask) -> None:
        if packs:
            values = (m.R[slot].astype(dtype) << shift for slot, shift in parts)
            m.put(whole, functools.reduce(or_, values), mask)
            return
        for slot, shift in parts:
            m.put(slot, (m.R[whole] >> shift).astype(part), mask)

    return step


@opcode("cvt")
def _cvt(b: Build, instruction: Instruction) -> Step:
    """Conversions (9.7.9.21)."""
    _, *mods, to, of = instruction.mods
    if to in ("bf16x2", "f16x2") and of == "f32" and mods == ["rn"]:
        f = lambda high, low: joined(to_half(low, to), to_half(high, to))  # noqa: E731
        return plain((F32, F32), U32, f)(b, instruction)
    return plain((TYPES[of],), TYPES[to], _conversion(instruction, mods, to, of))(b, instruction)


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _conversion(
    instruction: Instruction, mods: list[str], to: str, of: str
) -> Callable[[Any], Any]:
    floats = ("f16", "bf16", "f32", "f64")
    rest = [mod for mod in mods if mod not in ("rn", "ftz", "sat", *ROUND)]
    if rest or ("sat" in mods and (to, of) != ("f32", "f32")):
        raise unknown(instruction)
    if "sat" in mods:  # to [0, 1]; NaN becomes 0 (9.7.9.21)
        seen = flushed if "ftz" in mods else lambda x: x
        return lambda x: np.fmin(np.fmax(seen(x), F32.type(0)), F32.type(1)) + F32.type(0)
    widen: Callable[[Any], Any] = from_bf16 if of == "bf16" else lambda x: x
    if to == "bf16":
        return lambda x: to_bf16(widen(x).astype(F32))
    dtype = TYPES[to]
    if to in floats or of not in floats:
        return lambda x: widen(x).astype(dtype)
    rounding = ROUND[next(mod for mod in mods if mod in ROUND)]
    limits = np.iinfo(dtype)

    def saturated(x: Any) -> Any:
        wide = np.nan_to_num(rounding(widen(x).astype(F64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        return np.clip(wide, float(limits.min), float(limits.max)).astype(dtype)

    return saturated


@opcode("ld.param")
def _ld_param(b: Build, instruction: Instruction) -> Step:
    """A parameter by name or, where the compiler chooses between two, by address."""
    to, name = instruction.args
    if not isinstance(to, int):
        raise unknown(instruction)
    dtype, kind = b.program.dtypes[to], TYPES[instruction.type]
    if isinstance(name, Address) and name.offset == 0:
        return _ld_chosen(b, to, name, kind)
    if not isinstance(name, Name) or kind.itemsize != dict(b.program.params)[name.text].itemsize:
        raise unknown(instruction)

    return lambda m, mask: m.put(to, m.params[name.text].view(kind).astype(dtype), mask)


def _ld_chosen(b: Build, to: int, operand: Address, kind: np.dtype) -> Step:
    slot, offset = address_of(b, operand, np.uint64)
    params = enumerate(b.program.params, NAMED + len(b.program.strings))
    # since Triton 3.9 the register has 32 bits
    fit = {at % (1 << 8 * offset.itemsize): (name, dtype) for at, (name, dtype) in params}
    names = {at: name for at, (name, dtype) in fit.items() if dtype.itemsize == kind.itemsize}

    def step(m: Machine, mask: Mask) -> None:
        chosen = [m.params[names[at]] for at in m.addresses(slot, offset, mask).tolist()]
        m.put_rows([to], np.array([chosen]).view(kind), mask)

    return step


@opcode("cvta.global", "cvta.to.global")
def _cvta(b: Build, instruction: Instruction) -> Step:
    """cvta (9.7.9.20): a global address is its own generic address."""
    return plain(TYPES["u64"], TYPES["u64"], lambda x: x[()])(b, instruction)


@opcode("st.param")
def _st_param(b: Build, i: Instruction) -> Step:
    """A parameter of a call; what is called is known to end the kernel."""
    name, slot = i.args[0], b.slot(i.args[1], CLASSES[i.type])
    assert isinstance(name, Name)

    def step(m: Machine, mask: Mask) -> None:
        m.outgoing[name.text] = int(m.full(slot)[m.index(mask)[0]])

    return step


@opcode("createpolicy")
def _policy(b: Build, instruction: Instruction) -> Step:
    """Executes createpolicy as a dummy value, since a cache policy changes no result."""
    to = instruction.args[0]
    assert isinstance(to, int)
    return lambda m, mask: m.put(to, np.uint64(0), mask)


# --- memory ---------------------------------------------------------------------------------------


@opcode(*(f"{op}.{space}" for op in ("ld", "st") for space in ("global", "shared", "shared::cta")))
def _access(b: Build, i: Instruction) -> Step:
    """ld (9.7.9.8) and st (9.7.9.11); cache operators and hints change no result."""
    load, in_global, dtype = i.mods[0] == "ld", i.mods[1] == "global", CLASSES[i.type]
    registers, place = i.args[:2] if load else (i.args[1], i.args[0])
    slots = b.vector(registers, dtype)
    slot, offset = address_of(b, place, np.uint64 if in_global else np.uint32)
    if load and i.type.startswith("s"):  # a wider register has the sign extended
        dtype = np.dtype(f"i{dtype.itemsize}")

    def step(m: Machine, mask: Mask) -> None:
        memory = m.memory if in_global else m.shared
        lanes, addresses = m.index(mask), m.addresses(slot, offset, mask)
        if load:
            m.put_rows(slots, memory.load(lanes, addresses, dtype, len(slots)), mask)
        else:
            memory.store(lanes, addresses, m.rows(slots, mask, dtype))

    return step
