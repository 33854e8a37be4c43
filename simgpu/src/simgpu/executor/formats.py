"""Number formats: conversions between bits and floats, and sums that are rounded once."""

from collections.abc import Callable
from typing import Any

import numpy as np

from simgpu.executor.ptx import U16, U32, U64

F32, F64, F16 = np.dtype("f4"), np.dtype("f8"), np.dtype("f2")
TINY = np.finfo(np.float32).smallest_normal


def from_bf16(x: Any) -> Any:
    """uint16 bits -> float32."""
    return (x.astype(U32) << np.uint32(16)).view(F32)


def to_bf16(x: Any) -> Any:
    """float32 -> uint16 bits, rounded to nearest even; NaN is 0x7fff."""
    bits = x.view(U32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(U16))


def halves(x: Any, kind: str) -> tuple[Any, Any]:
    """uint32 bits of two 16-bit floats -> (low, high) in float32."""
    low, high = (x & np.uint32(0xFFFF)).astype(U16), (x >> np.uint32(16)).astype(U16)
    return from_half(low, kind), from_half(high, kind)


def from_half(x: Any, kind: str) -> Any:
    """uint16 bits of "bf16" or "f16" -> float32."""
    return from_bf16(x) if kind.startswith("bf16") else x.view(F16).astype(F32)


def to_half(x: Any, kind: str) -> Any:
    """float32 -> uint16 bits of "bf16" or "f16"."""
    return to_bf16(x) if kind.startswith("bf16") else x.astype(F16).view(U16)


def joined(low: Any, high: Any) -> Any:
    """Two uint16 -> uint32."""
    return low.astype(U32) | (high.astype(U32) << np.uint32(16))


def of_halves(f: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A function of 16-bit floats, in float32 and rounded once; with "x2" of two a register."""

    def two(*packed: Any) -> Any:
        parts = zip(*(halves(x, kind) for x in packed))
        return joined(*(to_half(f(*x), kind) for x in parts))

    if kind.endswith("x2"):
        return two
    return lambda *x: to_half(f(*(from_half(y, kind) for y in x)), kind)


def in_f64(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of float32, computed in float64 and rounded once."""
    return lambda x: f(x.astype(F64)).astype(F32)


def flushed(x: Any) -> Any:
    """float32 with subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def to_odd(total: Any, error: Any) -> Any:
    """float64 sums rounded to odd, which a second rounding to float32 or less cannot spoil.

    Boldo and Melquiond, "When double rounding is odd", 2004.

    Args:
        total: rounded to nearest.
        error: what the rounding lost.
    """
    even = (total.view(U64) & np.uint64(1)) == 0
    other = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even & np.isfinite(error), other, total)


def exact_fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 or narrower in float64, rounded to odd."""
    product, c = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    total = product + c
    tail = total - product
    return to_odd(total, (product - (total - tail)) + (c - tail))


def half_fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded to odd: rounding it to 16 bits is the only rounding."""
    exact = exact_fma(a, b, c)
    result = exact.astype(F32)
    back = result.astype(F64)
    even = (result.view(U32) & np.uint32(1)) == 0
    other = np.nextafter(result, np.where(exact > back, np.inf, -np.inf).astype(F32))
    return np.where((back != exact) & even, other, result)


def fma(a: Any, b: Any, c: Any, mode: str = "rn") -> Any:
    """a * b + c of float32, rounded once: to nearest, down ("rm"), up ("rp") or to zero ("rz")."""
    if mode != "rn":
        return _towards(mode, a, b, c)
    total = np.multiply(a, b, dtype=F64) + c
    result = total.astype(F32)
    halfway = (total.view(U64) & np.uint64(0x1FFF_FFFF)) == 0x1000_0000
    if (halfway | (np.abs(result) < TINY)).any():
        result = exact_fma(a, b, c).astype(F32)
    return result


def _towards(mode: str, a: Any, b: Any, c: Any) -> Any:
    exact = exact_fma(a, b, c)
    result = exact.astype(F32)
    limit = {"rm": -np.inf, "rp": np.inf, "rz": 0.0}[mode]
    beyond = result < exact if mode == "rp" else result > exact
    if mode == "rz":
        beyond = np.abs(result) > np.abs(exact)
    result = np.where(beyond, np.nextafter(result, F32.type(limit)), result)
    if mode == "rm":  # a sum that is exactly 0 is -0, but for +0 + +0
        cancels = (exact == 0) & ~((np.multiply(a, b) == 0) & ~np.signbit(exact) & ~np.signbit(c))
        result = np.where(cancels, F32.type(-0.0), result)
    return result
