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


def row_programs(M: int, N: int, config: dict[str, int], at_once: int) -> tuple[int, int]:
    """Returns the grid of a backward: programs that walk over rows, and parts of the columns.

    Args:
        config: has BLOCK_M and BLOCK_N.
        at_once: programs that run at the same time; with fewer rows there are fewer.
    """
    parts = -(-N // config["BLOCK_N"])
    return min(max(1, at_once // parts), -(-M // config["BLOCK_M"])), parts


MOST = 8
"""Number of matrices of partial sums that one launch adds up."""
_SIZES = [f"{size}_{letter}" for letter in "abcdefgh" for size in "PN"]


@triton.jit(do_not_specialize=_SIZES)
def _reduce_partials_kernel(
    sums_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr,
    P_a, N_a, P_b, N_b, P_c, N_c, P_d, N_d, P_e, N_e, P_f, N_f, P_g, N_g, P_h, N_h,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds up the P partial sums of each column, always in the same order.

    One axis of the grid is for the columns, the other for the matrices (P, N).
    """
    parts_ptr, P, N = a_ptr, P_a, N_a
    others = (b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr)
    heights, widths = (P_b, P_c, P_d, P_e, P_f, P_g, P_h), (N_b, N_c, N_d, N_e, N_f, N_g, N_h)
    for i in tl.static_range(7):  # pyright: ignore[reportGeneralTypeIssues] (its stub)
        if tl.program_id(1) > i:
            sums_ptr, parts_ptr, P, N = sums_ptr + N, others[i], heights[i], widths[i]
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    sums = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < P)[:, None] & mask_n[None, :]
        offs = (offs_p.to(tl.int64) * N)[:, None] + offs_n[None, :]
        sums += tl.load(parts_ptr + offs, mask=mask, other=0.0)
    tl.store(sums_ptr + offs_n, tl.sum(sums, axis=0), mask=mask_n)


def reduce_partials(parts: Tensor, more: list[Tensor], sums: Tensor) -> None:
    """Writes the column sums of matrices of partial sums (P, N), fp32, one after the other."""
    matrices = [parts, *more]
    if not any(len(x) for x in matrices):
        sums.zero_()
        return
    for i in range(0, len(matrices), MOST):
        some = [x.contiguous() for x in matrices[i : i + MOST]]
        again = [some[0]] * (MOST - len(some))  # not read: the grid has no programs for them
        columns = [x.shape[1] for x in some]
        launch(
            _reduce_partials_kernel, (triton.cdiv(max(columns), 32), len(some)),
            sums, *some, *again, *(size for x in (*some, *again) for size in x.shape),
            BLOCK_P=64, BLOCK_N=32, num_warps=8,
        )  # fmt: skip
        sums = sums[sum(columns) :]
