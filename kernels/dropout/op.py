"""Dropout from packed random numbers (`packed_rng`): four draws of 16 bits from every 64-bit one.

On a CPU PyTorch draws one random number for each element; `python -m bench` measures both. The
probability is rounded to a multiple of 2**-16, and the scale is that of the rounded probability, so
the mean is kept (up to the rounding of the scale to x's dtype).
"""

import math

import torch
from torch import Tensor

_LEVELS = 1 << 16
"""Number of values of a draw."""


def dropout_keep(
    shape: tuple[int, ...], p: float, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, float]:
    """Draws which elements are kept, from PyTorch's default generator of `device`.

    The comparison writes `dtype` itself, because multiplying by bools takes 7 times as long on a
    CPU.

    Args:
        p: probability of dropping an element, in [0, 1).
        dtype: dtype of the mask, that of what it multiplies.

    Returns:
        tuple[Tensor, float]: mask of `shape` and `dtype`, 1 where kept and 0 elsewhere, and the
        factor 1 / (kept share).
    """
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    least, scale = dropped - _LEVELS // 2, _LEVELS / (_LEVELS - dropped)
    numel = math.prod(shape)
    draws = torch.empty((numel + 3) // 4, dtype=torch.int64, device=device)
    if torch.compiler.is_compiling():  # which knows no random_, and fuses the comparison
        draws = torch.randint_like(draws, -(2**63), 2**63 - 1) ^ -(2**63)  # random_'s bits
        return (draws.view(torch.int16)[:numel].view(shape) >= least).to(dtype), scale
    draws = draws.random_(-(2**63), None).view(torch.int16)[:numel].view(shape)
    mask = torch.empty(shape, dtype=dtype, device=device)
    return torch.ge(draws, least, out=mask), scale


def dropout(x: Tensor, p: float) -> Tensor:
    """Zeroes elements of floating `x` (any shape) with probability `p`, scales the rest up."""
    keep, scale = dropout_keep(tuple(x.shape), p, x.dtype, x.device)
    return x * keep.mul_(scale)
