"""Rotary position embeddings by PyTorch's ops, in fewer passes than the reference."""

from typing import Any

import torch
from torch import Tensor


class _Turned(torch.autograd.Function):
    """Turns as the reference, in fewer passes; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(cos, sin)
        # on a CPU conversions take longer than the rest
        dtype = x.dtype if x.is_cpu else torch.promote_types(x.dtype, torch.float32)
        y, halves = x.to(dtype), ((cos, cos), (-sin, sin))
        cos, sin = (torch.cat(pair, -1)[:, None].to(dtype) for pair in halves)
        y = torch.addcmul(y * cos, y.roll(x.shape[-1] // 2, -1), sin)
        # compiled by PyTorch 2.11, a conversion that changes nothing gives gradients of zero here
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        cos, sin = ctx.saved_tensors
        return _Turned.apply(dy, cos, -sin), None, None  # pyright: ignore


def rotary_plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `rotary` by PyTorch's ops, in fewer passes; on a CPU in the inputs' dtype."""
    return _Turned.apply(q, cos, sin), _Turned.apply(k, cos, sin)  # pyright: ignore
