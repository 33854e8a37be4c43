"""Tensor cores: fragments of mma.sync and wgmma, and matrices in shared memory by descriptor.

Products of 16-bit floats are exact in float64; a product over K = 16 is summed there with its
accumulator and rounded to float32 once.
"""

from collections.abc import Callable

import numpy as np

from simgpu.executor.build import Build, address_of, opcode, unknown
from simgpu.executor.errors import UnknownPtxError
from simgpu.executor.formats import from_half
from simgpu.executor.machine import Machine, Step
from simgpu.executor.ptx import U16, WARP, Array, Instruction
from simgpu.executor.state import Mask


def widened(bits: Array, kind: str) -> Array:
    """uint16 bits of "bf16" or "f16" -> float64."""
    return from_half(bits, kind).astype(np.float64)


def product(a: Array, b: Array, c: Array) -> Array:
    """a (..., M, K) @ b (..., K, N) + c (..., M, N), rounded to float32 once."""
    return (np.matmul(a, b) + c.astype(np.float64)).astype(np.float32)


# --- fragments ------------------------------------------------------------------------------------
# A warp's thread t is 4 * g + q. Registers hold two 16-bit elements, the lower column first.


def a_fragment(registers: Array, kind: str) -> Array:
    """Registers (4, warps * 32) -> A (warps, 16, 16): figures of 9.7.15.5.8."""
    halves = np.ascontiguousarray(registers).view(np.uint16)
    parts = halves.reshape(2, 2, -1, 8, 4, 2)  # column half, row half, warp, g, q, low or high
    return widened(parts.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16), kind)


def b_fragment(registers: Array, kind: str) -> Array:
    """Registers (2, warps * 32) -> B (warps, 16, 8)."""
    halves = np.ascontiguousarray(registers).view(np.uint16)
    parts = halves.reshape(2, -1, 8, 4, 2)  # row half, warp, g, q, low or high
    return widened(parts.transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8), kind)


def c_fragment(registers: Array) -> Array:
    """Registers (N / 2, warps * 32) -> C (warps, 16, N) in float32."""
    tiles = len(registers) // 4
    parts = np.ascontiguousarray(registers).view(np.float32).reshape(tiles, 2, 2, -1, 8, 4)
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, 8 * tiles)


def c_registers(c: Array) -> Array:
    """The reverse of `c_fragment`."""
    tiles = c.shape[2] // 8
    parts = c.reshape(-1, 2, 8, tiles, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(parts).reshape(4 * tiles, -1).view(np.uint32)


@opcode("mma.sync.aligned.m16n8k16.row.col.f32")
def _mma(b: Build, i: Instruction) -> Step:
    """mma.sync (9.7.15.5.14), one product a warp."""
    *_, kind, of_b, of_c = i.mods
    if kind not in ("bf16", "f16") or of_b != kind or of_c != "f32":
        raise unknown(i)
    d, *inputs = (b.vector(arg, np.uint32) for arg in i.args)

    def step(m: Machine, mask: Mask) -> None:
        a, x, c = (m.rows(slots, mask) for slots in inputs)
        result = product(a_fragment(a, kind), b_fragment(x, kind), c_fragment(c))
        m.put_rows(d, c_registers(result), mask)

    return step


# --- matrices in shared memory --------------------------------------------------------------------


@opcode("ldmatrix.sync.aligned.m8n8", "stmatrix.sync.aligned.m8n8")
def _matrices(b: Build, i: Instruction) -> Step:
    """ldmatrix (9.7.15.5.15): 8 x 8 matrices of 16-bit elements, a row of 16 bytes a thread.

    stmatrix (9.7.15.5.16) is the reverse.
    """
    load = i.mods[0] == "ldmatrix"
    registers, place = i.args if load else reversed(i.args)
    slots, (slot, offset) = b.vector(registers, np.uint32), address_of(b, place, np.uint32)
    trans, count = "trans" in i.mods, len(slots)

    def step(m: Machine, mask: Mask) -> None:
        rows = m.index(mask).reshape(-1, WARP)[:, : 8 * count].reshape(-1)
        addresses = (m.full(slot) + offset)[rows]
        if load:
            data = m.shared.load(rows, addresses, U16, 8).T.reshape(-1, count, 8, 8)
            data = np.ascontiguousarray(data.swapaxes(2, 3) if trans else data).view(np.uint32)
            values = data.transpose(1, 0, 2, 3).reshape(count, -1)  # thread 4 * row + pair
            m.put_rows(slots, values, mask)
        else:
            values = m.rows(slots, mask).reshape(count, -1, 8, 4)
            data = np.ascontiguousarray(values.transpose(1, 0, 2, 3)).view(np.uint16)
            data = data.swapaxes(2, 3) if trans else data
            m.shared.store(rows, addresses, np.ascontiguousarray(data.reshape(-1, 8).T))

    return step


CHUNK = 8
"""Elements of the 16 bytes that lie together whatever the layout."""


def chunk_addresses(
    start: Array, leading: Array, stride: Array, swizzle: int, size: int, transposed: bool
) -> Array:
    """Where the 16-byte chunks of an operand of a product over K = 16 are.

    The canonical layouts of 9.7.16.5.1 (CUTLASS names them Major::K and Major::MN).

    Args:
        start: address of each matrix (matrices,).
        leading: byte offset of each in the leading dimension.
        stride: byte offset of each in the stride dimension.
        swizzle: bytes of the swizzle's row: 0, 32, 64 or 128.
        size: M or N.
        transposed: the chunks run along M or N, not along K.

    Returns:
        (matrices, size, 2) with K in chunks, or if transposed (matrices, 16, size / 8).
    """
    start, leading, stride = (x[:, None, None].astype(np.int64) for x in (start, leading, stride))
    if not transposed:
        row, chunk = np.arange(size)[:, None], np.arange(2)
        if swizzle:
            offset = row // 8 * stride + row % 8 * swizzle + chunk * 16
        else:
            offset = row // 8 * stride + chunk * leading + row % 8 * 16
    else:
        k, chunk = np.arange(16)[:, None], np.arange(size // CHUNK)
        if swizzle:
            wide = swizzle // 16
            offset = chunk // wide * leading + chunk % wide * 16 + k // 8 * stride + k % 8 * swizzle
        else:
            offset = chunk * stride + k // 8 * leading + k % 8 * 16
    return swizzled(start + offset, swizzle)


def swizzled(address: Array, swizzle: int) -> Array:
    """Addresses with bits 4, 5 and 6 (or fewer) changed by bits 7, 8 and 9."""
    if not swizzle:
        return address
    ones = swizzle // 16 - 1
    return address ^ (((address >> 7) & ones) << 4)


WGMMA_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
TCGEN05_SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}


def read_descriptor(values: Array, tcgen05: bool) -> tuple[Array, Array, Array, int]:
    """(start, leading, stride, swizzle) of descriptors (9.7.15.5.1.2, 9.7.16.4.1)."""
    fields = [
        ((values >> np.uint64(at)) & np.uint64(0x3FFF)).astype(np.int64) << 4 for at in (0, 16, 32)
    ]
    kinds = np.unique(values >> np.uint64(61) if tcgen05 else values >> np.uint64(62))
    bases = np.unique((values >> np.uint64(49)) & np.uint64(7))
    if len(kinds) > 1 or bases.tolist() != [0]:
        raise UnknownPtxError("descriptors of several swizzles at a time, or with a base offset")
    table = TCGEN05_SWIZZLES if tcgen05 else WGMMA_SWIZZLES
    return fields[0], fields[1], fields[2], table[int(kinds[0])]


def read_operand(
    m: Machine, lanes: Array, descriptors: Array, tcgen05: bool, size: int, transposed: bool,
    kind: str, marks: Callable[[Array, Array], None],
) -> Array:  # fmt: skip
    """Operands in shared memory (matrices, size, 16), and `marks(lanes, units)` called for them.

    Args:
        lanes: for each matrix the thread that asks for it.
        descriptors: one for each matrix.
    """
    start, leading, stride, swizzle = read_descriptor(descriptors, tcgen05)
    where = chunk_addresses(start, leading, stride, swizzle, size, transposed)
    flat = where.reshape(len(lanes), -1)
    offset = m.shared.place(lanes, flat, 16, "a product reads")
    marks(np.repeat(lanes, flat.shape[1]), m.shared.units(offset.reshape(-1), 16))
    bits = m.shared.data.view(np.uint16)[(offset[..., None] >> 1) + np.arange(CHUNK)]
    bits = bits.reshape(len(lanes), *where.shape[1:], CHUNK)
    if transposed:
        return widened(bits.reshape(len(lanes), 16, size), kind).swapaxes(1, 2)
    return widened(bits.reshape(len(lanes), size, 16), kind)
