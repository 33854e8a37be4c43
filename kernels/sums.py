"""Sums of partial column sums, which backwards leave for a launch of its own.

They are an op of their own so that torch.compile's graphs show them: there `graphs` gives one
launch the partial sums of several backwards.
"""

import torch
from torch import Tensor

from .runtime import define_op


def _sum(parts: Tensor, more: list[Tensor]) -> Tensor:
    from .rows import sum_parts  # imported when first run: triton is missing on macOS

    return sum_parts([parts, *more])


def _sum_fake(parts: Tensor, more: list[Tensor]) -> Tensor:
    return parts.new_empty(sum(x.shape[1] for x in (parts, *more)), dtype=torch.float32)


_sum_parts = define_op("sum_parts(Tensor parts, Tensor[] more) -> Tensor", _sum, _sum_fake)


def vectors_of(parts: list[Tensor], *dtypes: torch.dtype | None) -> list[Tensor | None]:
    """Returns the column sums of the matrices of partial sums as vectors of these dtypes.

    Args:
        parts: matrices (P, N) fp32, whose columns follow each other.
        dtypes: of vectors of equal lengths, which share the columns; None has none of them.

    Returns:
        list[Tensor | None]: a vector for each dtype, None for None.
    """
    wanted = sum(dtype is not None for dtype in dtypes)
    if not wanted:
        return [None] * len(dtypes)
    vectors = iter(_sum_parts(parts[0], parts[1:]).chunk(wanted))
    return [None if dtype is None else next(vectors).to(dtype) for dtype in dtypes]
