"""Arithmetic (9.7.1 to 9.7.8): integers, floats, shifts, selections, comparisons.

Every result is rounded as the ISA says. Where it leaves bits open (`ex2.approx`, `div.full`, ...)
the result here is the correctly rounded one.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from simgpu.executor.build import Build, opcode, unknown
from simgpu.executor.formats import (
    F32,
    F64,
    exact_fma,
    flushed,
    fma,
    from_half,
    halves,
    joined,
    to_half,
    towards,
)
from simgpu.executor.lanes import TYPES, plain
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import BOOL, U16, U32, U64, Instruction, Vector
from simgpu.executor.state import Mask


def _divide(a: Any, b: Any) -> Any:
    """Quotient of integers, truncated; all bits set where the divisor is 0."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    floor = a // safe
    up = (a % safe != 0) & ((a < 0) != (safe < 0))
    return np.where(b == 0, np.array(-1).astype(a.dtype), floor + up.astype(a.dtype))


def _high(a: Any, b: Any) -> Any:
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def _shift_left(x: Any, n: Any) -> Any:
    width = 8 * x.dtype.itemsize
    return np.where(n >= width, 0, x << np.minimum(n, width - 1).astype(x.dtype)).astype(x.dtype)


def _shift_right(x: Any, n: Any) -> Any:
    width = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(n, width - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(n >= width, 0, shifted).astype(x.dtype)


def _extract(x: Any, start: Any, length: Any) -> Any:
    """bfe (9.7.1.20): `length` bits from `start`, extended by their sign in the signed form."""
    start, length = start.astype(np.int64) & 255, length.astype(np.int64) & 255
    field = (x.astype(np.int64) >> start) & ((np.int64(1) << length) - 1)
    if x.dtype.kind == "i":
        sign = np.where(length == 0, 0, np.int64(1) << np.maximum(length - 1, 0))
        field = (field ^ sign) - sign
    return field.astype(x.dtype)


def _permute(a: Any, b: Any, selector: Any) -> Any:
    """prmt.b32 (9.7.9.7): each byte of the result is one of the eight bytes of b:a."""
    both = (b.astype(U64) << np.uint64(32)) | a.astype(U64)
    result = np.uint64(0)
    for i in range(4):
        chosen = (selector >> np.uint32(4 * i)).astype(U64)
        byte = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        byte = np.where(chosen & np.uint64(8), sign, byte)
        result = result | (byte << np.uint64(8 * i))
    return result.astype(U32)


def _maximum(a: Any, b: Any) -> Any:
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))  # max(-0, +0) is +0


def _minimum(a: Any, b: Any) -> Any:
    return np.where((a == 0) & (b == 0), -(-a - b), np.fmin(a, b))


INTEGER = {
    "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "mul.hi": _high,
    "div": _divide, "rem": lambda a, b: a - _divide(a, b) * b,
    "min": np.minimum, "max": np.maximum,
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), a.dtype.type(0)),
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), a.dtype.type(0)),
    "mad.lo": lambda a, b, c: a * b + c,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "neg": np.negative, "abs": np.abs,
    "popc": lambda x: np.bitwise_count(x).astype(x.dtype),
}  # fmt: skip
FLOAT = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma, "div": np.divide,
    "min": _minimum, "max": _maximum, "min.NaN": np.minimum, "max.NaN": np.maximum,
    "neg": np.negative, "abs": np.abs,
    "ex2": lambda x: np.exp2(x.astype(F64)).astype(F32),
    "lg2": lambda x: np.log2(x.astype(F64)).astype(F32),
    "rcp": lambda x: (1 / x.astype(F64)).astype(F32),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(F64))).astype(F32),
    "tanh": lambda x: np.tanh(x.astype(F64)).astype(F32),
}  # fmt: skip
DIRECTED = {
    mode: {
        "fma": functools.partial(towards, mode),
        "add": lambda a, b, mode=mode: towards(mode, a, F32.type(1), b),
        "sub": lambda a, b, mode=mode: towards(mode, b, F32.type(-1), a),
    }
    for mode in ("rm", "rp", "rz")
}
"""Operations that are rounded down, up or towards zero."""
UNARY = ("not", "neg", "abs", "ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh")
IN_F32 = ("fma", "ex2", "lg2", "rcp", "rsqrt", "tanh")
"""Operations whose result is that of float32."""
ROUNDINGS = ("rn", "approx", "full", "ftz")
"""Modifiers after which a result is the correctly rounded one; "ftz" also flushes subnormals."""


@opcode(*{name.split(".")[0] for name in {**INTEGER, **FLOAT}})
def _arithmetic(b: Build, instruction: Instruction) -> Step:
    first, *mods, kind = instruction.mods
    modes = [mod for mod in mods if mod not in ROUNDINGS]
    name = ".".join([first, *modes])
    if kind in ("f16x2", "bf16x2", "f16", "bf16") and modes != ["f32"]:
        return _of_halves(name, kind)(b, instruction)
    if kind == "f32x2":
        return _of_pairs(name)(b, instruction)
    if modes == ["f32"] and kind in ("bf16", "f16"):
        return _mixed(first, kind)(b, instruction)
    if name == "mul.wide" or name == "mad.wide":
        return _wide_product(first, kind)(b, instruction)
    if kind == "f32" and modes and modes[0] in DIRECTED and first in DIRECTED[modes[0]]:
        f = DIRECTED[modes[0]][first]
        seen = flushed if "ftz" in mods else lambda x: x
        dtypes = (F32,) * (len(instruction.args) - 1)
        return plain(dtypes, F32, lambda *x: seen(f(*map(seen, x))))(b, instruction)
    table = FLOAT if kind in ("f32", "f64") else INTEGER
    if name not in table or kind not in TYPES or (kind == "f64" and first in IN_F32):
        raise unknown(instruction)
    f = table[name]
    if "ftz" in mods:
        exact = f
        f = lambda *x: flushed(exact(*map(flushed, x)))  # noqa: E731
    dtype = TYPES[kind]
    count = len(instruction.args) - 1
    if name.startswith(("min", "max")) and count == 3:  # sm_100 has them of three
        two = f
        f = lambda x, y, z: two(two(x, y), z)  # noqa: E731
    return plain((dtype,) * count, dtype, f)(b, instruction)


def _of_halves(name: str, kind: str) -> Any:
    """16-bit floats, computed in wider ones and rounded once; two a register with "x2"."""

    def one(*x: Any) -> Any:
        wide = _narrow(exact_fma(*x)) if name == "fma" else FLOAT[name](*x)
        return to_half(wide, kind)

    def two(*packed: Any) -> Any:
        return joined(*(one(*x) for x in zip(*(halves(x, kind) for x in packed))))

    count = 3 if name == "fma" else 1 if name in UNARY else 2
    if kind.endswith("x2"):
        return plain((U32,) * count, U32, two)
    return plain((U16,) * count, U16, lambda *x: one(*(from_half(y, kind) for y in x)))


def _narrow(x: Any) -> Any:
    """float64 rounded to odd -> float32 rounded to odd, to be rounded once more to 16 bits."""
    y = x.astype(F32)
    back = y.astype(F64)
    even = (y.view(U32) & np.uint32(1)) == 0
    towards = np.where(x > back, np.inf, -np.inf).astype(F32)
    return np.where((back != x) & even, np.nextafter(y, towards), y)


def _of_pairs(name: str) -> Any:
    def f(*packed: Any) -> Any:
        parts = ([(x >> np.uint64(at)).astype(U32).view(F32) for x in packed] for at in (0, 32))
        low, high = (FLOAT[name](*x).view(U32).astype(U64) for x in parts)
        return low | (high << np.uint64(32))

    return plain((U64,) * (3 if name == "fma" else 2), U64, f)


def _mixed(name: str, kind: str) -> Any:
    """fma, add and sub of 16-bit floats into float32 (9.7.5): the last operand is float32."""

    def f(*x: Any) -> Any:
        return FLOAT[name](*(from_half(y, kind) for y in x[:-1]), x[-1])

    return plain((*(U16,) * (2 if name == "fma" else 1), F32), F32, f)


def _wide_product(name: str, kind: str) -> Any:
    wide = {"s32": np.dtype("i8"), "u32": U64, "s16": np.dtype("i4"), "u16": U32}[kind]
    dtype = TYPES[kind]
    if name == "mul":
        return plain((dtype, dtype), wide, lambda a, c: a.astype(wide) * c.astype(wide))
    return plain((dtype, dtype, wide), wide, lambda a, c, d: a.astype(wide) * c.astype(wide) + d)


OF_BITS = {"shl": _shift_left, "shr": _shift_right, "bfe": _extract, "prmt": _permute}


@opcode("shl", "shr", "bfe.u32", "bfe.s32", "prmt.b32")
def _of_bits(b: Build, instruction: Instruction) -> Step:
    """Shifts, fields and permutations: all operands but the first are u32."""
    if instruction.type not in TYPES:  # another mode of prmt
        raise unknown(instruction)
    dtype = TYPES[instruction.type]
    dtypes = (dtype, *(U32,) * (len(instruction.args) - 2))
    return plain(dtypes, dtype, OF_BITS[instruction.mods[0]])(b, instruction)


@opcode("selp")
def _selp(b: Build, instruction: Instruction) -> Step:
    to = instruction.args[0]
    assert isinstance(to, int)
    dtype = b.program.dtypes[to]
    return plain((dtype, dtype, BOOL), dtype, lambda a, c, p: np.where(p, a, c))(b, instruction)


COMPARE = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@opcode("setp")
def _setp(b: Build, instruction: Instruction) -> Step:
    _, compare, *mods, kind = instruction.mods
    pair = isinstance(instruction.args[0], Vector)
    if any(mod != "ftz" for mod in mods) or pair != (kind in ("f16x2", "bf16x2")):
        raise unknown(instruction)
    if pair:
        return _setp_pair(b, instruction, COMPARE[compare], kind)
    f, dtype = COMPARE[compare], TYPES[kind]
    seen: Callable[[Any], Any] = flushed if mods else lambda x: x
    if kind in ("f16", "bf16"):
        dtype, seen = U16, lambda x: from_half(x, kind)
    return plain((dtype, dtype), BOOL, lambda x, y: f(seen(x), seen(y)))(b, instruction)


def _setp_pair(b: Build, instruction: Instruction, f: Callable[..., Any], kind: str) -> Step:
    """setp of pairs of 16-bit floats (9.7.7.2): a predicate for the low and one for the high."""
    to, *sources = instruction.args
    to, sources = b.vector(to, BOOL), [b.slot(source, U32) for source in sources]

    def step(m: Machine, mask: Mask) -> None:
        for slot, *x in zip(to, *(halves(m.R[source], kind) for source in sources)):
            if slot is not None:
                m.put(slot, f(*x), mask)

    return step
