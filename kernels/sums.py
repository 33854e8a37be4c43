"""Sums of partial column sums, which backwards leave for a launch of its own.

They are an op of their own so that torch.compile's graphs show them: there `graphs` gives one
launch the partial sums of several backwards.
"""

import torch
from torch import Tensor

from .runtime import Op, filled


def _sums(parts: Tensor, more: list[Tensor]) -> Tensor:
    columns = sum(x.shape[1] for x in (parts, *more))
    return torch.empty(columns, dtype=torch.float32, device=parts.device)


_reduce_partials = Op(
    "reduce_partials(Tensor parts, Tensor[] more) -> Tensor",
    filled(_sums, f"{__package__}.rows:reduce_partials"),
    _sums,
)


def split_grads(parts: Tensor, *dtypes: torch.dtype | None) -> list[Tensor | None]:
    """Returns the column sums of a matrix of partial sums as vectors of these dtypes.

    Args:
        parts: (P, N) fp32.
        dtypes: of vectors of equal lengths, which share the columns; None has none of them.

    Returns:
        list[Tensor | None]: a vector for each dtype, None for None.
    """
    wanted = sum(dtype is not None for dtype in dtypes)
    if not wanted:
        return [None] * len(dtypes)
    vectors = iter(_reduce_partials(parts, []).chunk(wanted))
    return [None if dtype is None else next(vectors).to(dtype) for dtype in dtypes]
