"""Helpers for row-wise kernels: matrix views, block sizes, and the sum of partial column sums.

Shapes
    M = rows, N = columns, P = partial sums of each column
"""

import triton
import triton.language as tl
from torch import Tensor

from .runtime import launch


def as_rows(x: Tensor) -> Tensor:
    """Returns x as (M, N) with contiguous columns: a view where strides allow it, else a copy."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def row_blocks(n: int, elements: int) -> tuple[int, int]:
    """Returns (columns, rows) of a block of about `elements` elements that spans `n` columns."""
    block_n = max(64, 1 << (n - 1).bit_length())  # not narrower: each size must be tested
    return block_n, max(1, min(16, elements // block_n))


@triton.jit(do_not_specialize=["P"])
def _norm_sum_kernel(
    a_parts_ptr, b_parts_ptr, c_parts_ptr, a_ptr, b_ptr, c_ptr,
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds up the P partial sums of each column, always in the same order.

    One axis of the grid is for the columns, the other for the pairs (parts, sums) that are there.
    """
    if tl.program_id(1) == 0:
        _sum_parts(a_parts_ptr, a_ptr, P, N, BLOCK_P, BLOCK_N)
    elif tl.program_id(1) == 1:
        _sum_parts(b_parts_ptr, b_ptr, P, N, BLOCK_P, BLOCK_N)
    else:
        _sum_parts(c_parts_ptr, c_ptr, P, N, BLOCK_P, BLOCK_N)


@triton.jit
def _sum_parts(parts_ptr, sums_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    if sums_ptr is not None:
        offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        sums = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
        for start in range(0, P, BLOCK_P):
            offs_p = start + tl.arange(0, BLOCK_P)
            mask = (offs_p < P)[:, None] & mask_n[None, :]
            offs = (offs_p.to(tl.int64) * N)[:, None] + offs_n[None, :]
            sums += tl.load(parts_ptr + offs, mask=mask, other=0.0)
        total = tl.sum(sums, axis=0).to(sums_ptr.dtype.element_ty)
        tl.store(sums_ptr + offs_n, total, mask=mask_n)


def sum_parts(*pairs: tuple[Tensor, Tensor]) -> None:
    """Writes the column sums of parts (P, N), fp32, into vectors (N,) of any dtype.

    Args:
        pairs: up to three of (parts, vector), all of one shape; those of no elements are left out.
    """
    wanted = [pair for pair in pairs if pair[0].numel()]
    if not wanted:
        return
    P, N = wanted[0][0].shape
    parts, sums = zip(*wanted)
    none = (None,) * (3 - len(wanted))
    launch(
        _norm_sum_kernel, (triton.cdiv(N, 32), len(wanted)),
        *parts, *none, *sums, *none, P, N, BLOCK_P=64, BLOCK_N=32, num_warps=8,
    )  # fmt: skip
