"""Arithmetic of the executor against exact fractions, Python's integers and PyTorch's formats."""

import math
import operator
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from executor.ptx import aligned, apply, placed, run

EDGES = [0, 1, 2, 3, 31, 32, 33, 255, 256, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF]


def pairs(values=EDGES, dtype=np.uint32):
    a, b = np.meshgrid(np.array(values, dtype), np.array(values, dtype))
    return a.ravel(), b.ravel()


def signed(x, bits=32):
    return x - (1 << bits) if x >> (bits - 1) else x


def truncated(a, b):
    return (1 if (a < 0) == (b < 0) else -1) * (abs(a) // abs(b)) if b else -1


INTEGERS = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: (a * b) >> 32,
    "mul.hi.s32": lambda a, b: (signed(a) * signed(b)) >> 32,
    "mul.wide.s32": lambda a, b: signed(a) * signed(b),
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "div.s32": lambda a, b: truncated(signed(a), signed(b)),
    "rem.s32": lambda a, b: signed(a) - truncated(signed(a), signed(b)) * signed(b),
    "div.u32": lambda a, b: a // b if b else -1,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": max,
    "min.relu.s32": lambda a, b: max(0, min(signed(a), signed(b))),
    "max.relu.s32": lambda a, b: max(0, signed(a), signed(b)),
    "and.b32": operator.and_, "or.b32": operator.or_, "xor.b32": operator.xor,
    "popc.b32": int.bit_count, "popc.b64": int.bit_count,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    a, b = pairs()
    wide = a.astype(np.uint64) << np.uint64(32) | b
    given = {"popc.b32": [a], "popc.b64": [wide], "mad.wide.u32": [a, b, wide]}.get(name, [a, b])
    got = apply(name, np.uint64 if "wide" in name else np.uint32, *given)
    want = [INTEGERS[name](*map(int, x)) % (1 << 8 * got.itemsize) for x in zip(*given)]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_bit_fields(kind):
    x = np.full(33 * 33, 0xA5C3_0F96, np.uint32)
    start, length = pairs(range(33))
    got = apply(f"bfe.{kind}", np.uint32, x, start, length)
    for value, s, n in zip(got.tolist(), start.tolist(), length.tolist()):
        wide = signed(0xA5C3_0F96) if kind == "s32" else 0xA5C3_0F96
        field = (wide >> s) & ((1 << n) - 1)
        assert value == (signed(field, n) if n and kind == "s32" else field) % 2**32, (s, n)


def test_every_selector_of_prmt():
    selector = np.arange(65_536, dtype=np.uint32)
    a, b = np.full_like(selector, 0x8304_7F01), np.full_like(selector, 0x0680_F00D)
    got = apply("prmt.b32", np.uint32, a, b, selector)
    source = struct.pack("<II", 0x8304_7F01, 0x0680_F00D)

    def byte(code):
        value = source[code & 7]
        return (0xFF if value & 0x80 else 0) if code & 8 else value

    for s in range(0, 65_536, 7):
        want = bytes(byte(s >> (4 * i) & 15) for i in range(4))
        assert struct.pack("<I", int(got[s])) == want, hex(s)


def rounded(x: Fraction, mantissa: int, low: int) -> Fraction:
    """Rounds to `mantissa` bits, to even; no finer than 2**low."""
    if x == 0:
        return x
    exponent = math.floor(math.log2(abs(x))) + 1
    while abs(x) >= Fraction(2) ** exponent:
        exponent += 1
    while abs(x) < Fraction(2) ** (exponent - 1):
        exponent -= 1
    unit = Fraction(2) ** max(exponent - mantissa, low)
    return Fraction(round(x / unit)) * unit


FORMATS = {
    "f32": (torch.float32, 24, -149), "bf16": (torch.bfloat16, 8, -133),
    "f16": (torch.float16, 11, -24),
}  # fmt: skip
"""PyTorch's dtype, bits of the mantissa, and exponent of the smallest number."""


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize]).numpy().view(f"u{x.itemsize}")


def numbers(bits, dtype):
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(dtype)


@pytest.mark.parametrize("kind", FORMATS)
def test_fma_rounds_once(kind):
    """Also sums beside the middle between two floats, by less than a wider float can tell."""
    dtype, mantissa, low = FORMATS[kind]
    generator = np.random.default_rng(0)
    a, b, c = generator.standard_normal((3, 4000))
    if kind == "f32":
        c *= 10.0 ** generator.integers(-12, 12, 4000)
        a[:4] = [1 + 2**-12, -1 - 2**-12, 2**-75, 1 + 2**-23]
        b[:4] = [2**-24 - 2**-36 + 2**-48, 2**-24 - 2**-36 + 2**-48, 2**-74, 2**-24 + 2**-47]
        c[:4] = [1, 1 + 2**-22, 2**-126, 1]  # products of 2**-24 + 2**-60 and the like
    else:
        a[:2], b[:2], c[:2] = 1.5, 1 + 2.0 ** (1 - mantissa), (2**-24, -(2**-24))
    operands = [torch.from_numpy(x).to(dtype) for x in (a, b, c)]
    got = apply(f"fma.rn.{kind}", f"u{dtype.itemsize}", *map(bits, operands))
    every = [x.double().tolist() for x in (numbers(got, dtype), *operands)]
    for value, x, y, z in zip(*every):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert Fraction(value) == rounded(exact, mantissa, low), (x, y, z)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_every_16_bit_number_converts_as_in_torch(kind):
    dtype, *_ = FORMATS[kind]
    every = np.arange(65_536, dtype=np.uint16)
    wide = apply(f"cvt.f32.{kind}", np.float32, every)
    want = numbers(every, dtype).float().numpy()
    np.testing.assert_array_equal(wide, want)
    generator = np.random.default_rng(0)
    x = generator.integers(0, 2**32, 65_536, dtype=np.uint32).view(np.float32)
    x[::2] = want[::2] * np.float32(1 + 2**-9)  # halves of the last place and near them
    mine = numbers(apply(f"cvt.rn.{kind}.f32", np.uint16, x), dtype)
    torch.testing.assert_close(mine, torch.from_numpy(x).to(dtype), rtol=0, atol=0, equal_nan=True)


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, np.inf, -np.inf, np.nan, 0.1], np.float32)


COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "gtu"]


@pytest.mark.parametrize("compare", COMPARISONS)
def test_comparisons_with_nan(compare):
    a, b = pairs(SPECIAL, np.float32)
    operation = f"setp.{compare}.f32 %p1, {{1}}, {{2}}; selp.b32 {{0}}, 1, 0, %p1;"
    got = apply(operation, np.uint32, a, b)
    ordered = getattr(operator, compare[:2])  # a third letter: true of NaN
    for value, x, y in zip(got.tolist(), a.tolist(), b.tolist()):
        unordered = math.isnan(x) or math.isnan(y)
        assert value == (len(compare) == 3 if unordered else ordered(x, y)), (x, y)


def test_comparisons_of_pairs_give_two_predicates():
    a, b = pairs([0, -0.0, 1, -1, 0.5, 65504, np.inf, -np.inf, np.nan], np.float16)
    low, high = (p.view(np.uint16).astype(np.uint32) for p in (a, b))
    x, y = low | high << 16, high | low << 16
    operation = """setp.lt.f16x2 %p1|%p2, {1}, {2}; selp.b32 %r50, 1, 0, %p1;
        selp.b32 {0}, 2, 0, %p2; add.s32 {0}, {0}, %r50;"""
    assert apply(operation, np.uint32, x, y).tolist() == ((a < b) + 2 * (b < a)).tolist()


def test_max_and_min_ignore_nan_and_know_the_signs_of_zero():
    a, b = pairs(SPECIAL, np.float32)
    for name, sign in (("max", 1), ("min", -1)):
        got = apply(f"{name}.f32", np.float32, a, b)
        for value, x, y in zip(got, a, b):
            known = [v for v in (x, y) if not np.isnan(v)]
            if not known:
                assert np.isnan(value)
                continue
            want = max(known, key=lambda v: (sign * float(v), sign * math.copysign(1, v)))
            assert struct.pack("f", value) == struct.pack("f", want), (name, x, y)


def test_floats_to_integers_saturate():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.nan, np.inf, -np.inf], np.float32)
    assert apply("cvt.rni.s32.f32", np.int32, x).tolist() == [
        0, 2, 2, 0, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31)]  # fmt: skip
    assert apply("cvt.rzi.u32.f32", np.uint32, x).tolist() == [
        0, 1, 2, 0, 0, 3_000_000_000, 0, 0, 2**32 - 1, 0]  # fmt: skip


def test_a_reduction_over_a_warp_while_another_warp_is_elsewhere():
    values, found = placed(np.float32(np.arange(64) - 3)), aligned(64, np.float32)
    body = """
        mad.wide.u32 %rd2, %r0, 4, %rd0; mad.wide.u32 %rd3, %r0, 4, %rd1;
        ld.global.b32 %r10, [%rd2]; setp.ge.u32 %p1, %r0, 32; mov.b32 %r12, -1;
        @%p1 bra $L_second;
        redux.sync.max.f32 %r11, %r10, %r12; st.global.b32 [%rd3], %r11; ret;
    $L_second:
        redux.sync.min.f32 %r11, %r10, %r12; st.global.b32 [%rd3], %r11;
    """
    run(body, values, found, warps=2)
    assert found.tolist() == 32 * [28.0] + 32 * [29.0]
