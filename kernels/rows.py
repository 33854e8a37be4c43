"""Helpers for row-wise kernels: matrix views, block sizes, and the sum of partial column sums.

Shapes
    M = rows, N = columns, P = partial sums of each column
"""

import triton
import triton.language as tl
from torch import Tensor


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
    dweight_parts_ptr, dbias_parts_ptr, dweight_ptr, dbias_ptr,
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds up the P partial sums of each column, always in the same order."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    dweight = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < P)[:, None] & mask_n[None, :]
        offs = (offs_p.to(tl.int64) * N)[:, None] + offs_n[None, :]
        if dweight_ptr is not None:
            dweight += tl.load(dweight_parts_ptr + offs, mask=mask, other=0.0)
        if dbias_ptr is not None:
            dbias += tl.load(dbias_parts_ptr + offs, mask=mask, other=0.0)
    if dweight_ptr is not None:
        total = tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + offs_n, total, mask=mask_n)
    if dbias_ptr is not None:
        total = tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + offs_n, total, mask=mask_n)
