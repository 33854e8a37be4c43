"""Arithmetic (9.7.1 to 9.7.8): integers, floats, shifts, selections, comparisons.

Every result is rounded as the ISA says. Where it leaves bits open (`ex2.approx`, `div.full`, ...)
the result here is the correctly rounded one.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from simgpu.executor.build import Build, Builder, opcode, plain, unknown
from simgpu.executor.formats import flushed, fma, from_half, half_fma, halves, in_f64, of_halves
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import BOOL, CLASSES, TYPES, U16, U32, U64, Instruction, Vector
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
    "ex2": in_f64(np.exp2), "lg2": in_f64(np.log2), "tanh": in_f64(np.tanh), "sqrt": np.sqrt,
    "rcp": in_f64(np.reciprocal), "rsqrt": in_f64(lambda x: 1 / np.sqrt(x)),
}  # fmt: skip
for _mode in ("rm", "rp", "rz"):  # rounded down, up, towards zero
    FLOAT |= {
        f"fma.{_mode}": functools.partial(fma, mode=_mode),
        f"add.{_mode}": lambda a, b, mode=_mode: fma(a, np.float32(1), b, mode),
        f"sub.{_mode}": lambda a, b, mode=_mode: fma(b, np.float32(-1), a, mode),
    }
IN_F32 = ("fma", "ex2", "lg2", "rcp", "rsqrt", "tanh")
"""Operations in float32 alone."""
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
ROUNDINGS = ("rn", "approx", "full", "ftz")
"""Modifiers after which a result is the correctly rounded one; "ftz" also flushes subnormals."""


@opcode(*{name.split(".")[0] for name in {**INTEGER, **FLOAT}})
def _arithmetic(b: Build, instruction: Instruction) -> Step:
    first, *mods, kind = instruction.mods
    modes = [mod for mod in mods if mod not in ROUNDINGS]
    name = ".".join([first, *modes])
    if kind in HALVES:
        return _of_16_bits(instruction, first, name, kind)(b, instruction)
    if kind == "f32x2":
        f = _of_floats(instruction, name)
        return plain(U64, U64, functools.partial(_of_pairs, f))(b, instruction)
    if name in ("mul.wide", "mad.wide"):
        return _wide_product(instruction)(b, instruction)
    table = FLOAT if kind in ("f32", "f64") else INTEGER
    in_f32_alone = first in IN_F32 or modes[:1] in (["rm"], ["rp"], ["rz"])
    if name not in table or kind not in TYPES or (kind == "f64" and in_f32_alone):
        raise unknown(instruction)
    f = table[name]
    if "ftz" in mods:
        exact = f
        f = lambda *x: flushed(exact(*map(flushed, x)))  # noqa: E731
    if name.startswith(("min", "max")) and len(instruction.args) == 4:  # sm_100 has them of three
        two = f
        f = lambda x, y, z: two(two(x, y), z)  # noqa: E731
    return plain(TYPES[kind], TYPES[kind], f)(b, instruction)


def _of_floats(instruction: Instruction, name: str) -> Callable[..., Any]:
    """An operation of float32; one of 16 bits rounds once, to nearest."""
    directed = name.endswith((".rm", ".rp", ".rz"))
    if name not in FLOAT or (directed and instruction.mods[-1] in HALVES):
        raise unknown(instruction)
    return FLOAT[name]


def _of_16_bits(instruction: Instruction, first: str, name: str, kind: str) -> Builder:
    """Builds an operation of 16-bit floats; mode "f32": last operand and result fp32 (9.7.5)."""
    if name == f"{first}.f32":
        dtypes = (*(U16,) * (len(instruction.args) - 2), TYPES["f32"])
        exact = _of_floats(instruction, first)
        f = lambda *x: exact(*(from_half(y, kind) for y in x[:-1]), x[-1])  # noqa: E731
        return plain(dtypes, dtypes[-1], f)
    f = of_halves(half_fma if name == "fma" else _of_floats(instruction, name), kind)
    return plain(CLASSES[kind], CLASSES[kind], f)


def _of_pairs(f: Callable[..., Any], *packed: Any) -> Any:
    """A function of float32, of two a register."""
    parts = ([(x >> np.uint64(at)).astype(U32).view(np.float32) for x in packed] for at in (0, 32))
    low, high = (f(*x).view(U32).astype(U64) for x in parts)
    return low | (high << np.uint64(32))


def _wide_product(instruction: Instruction) -> Builder:
    """The product of two operands with all of its bits, and what may be added to it."""
    if instruction.type not in ("u16", "s16", "u32", "s32"):
        raise unknown(instruction)
    dtype = TYPES[instruction.type]
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")

    def f(x: Any, y: Any, *z: Any) -> Any:
        return sum(z, x.astype(wide) * y.astype(wide))

    return plain((dtype, dtype, wide)[: len(instruction.args) - 1], wide, f)


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
    f = COMPARE[compare]
    seen: Callable[[Any], Any] = flushed if mods else lambda x: x
    if kind in ("f16", "bf16"):
        seen = functools.partial(from_half, kind=kind)
    return plain(TYPES[kind], BOOL, lambda x, y: f(seen(x), seen(y)))(b, instruction)


def _setp_pair(b: Build, instruction: Instruction, f: Callable[..., Any], kind: str) -> Step:
    """setp of pairs of 16-bit floats (9.7.7.2): a predicate for the low and one for the high."""
    to, *sources = instruction.args
    to, sources = b.vector(to, BOOL), [b.slot(source, U32) for source in sources]

    def step(m: Machine, mask: Mask) -> None:
        for slot, *x in zip(to, *(halves(m.R[source], kind) for source in sources)):
            if slot is not None:
                m.put(slot, f(*x), mask)

    return step
