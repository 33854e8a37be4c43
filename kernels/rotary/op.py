"""Rotary position embeddings (RoPE): pairs of numbers of q and k, rotated by their position's
angle.

Shapes
    q: (B, T, H, D)   k: (B, T, K, D)   cos, sin: (T, D/2) fp32, a row for each position
Math
    (a, b) -> (a cos - b sin, a sin + b cos); pair i is (i, i + D/2).
    The gradient is rotated back by the same angle. Traffic: docs/kernels/rotary.md.
Source
    Su et al. 2021, arXiv:2104.09864, eq. 34.

A kernel runs once for q and k together, else `cpu.rotary_plain`. All math is fp32, but on a CPU
that of the inputs' dtype. Dtypes are kept, under autocast, too, as q and k come from a product that
autocast has cast.
"""

from typing import Any

import torch
from torch import Tensor

from ..checks import MAX_D, check_float, check_like
from ..runtime import Op, filled, like, runs_kernels
from .cpu import rotary_plain


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def rotary_ref(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of `rotary` in plain PyTorch; also accepts fp64."""
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _outputs(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return like(q), like(k)


def _grads(cos: Tensor, sin: Tensor, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor, ...]:
    """Allocates the gradients of q and k, empty where none comes in."""
    return tuple(cos.new_empty(0) if d is None else like(d) for d in (dq, dk))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:])


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
    one, two = rotary_bwd(*ctx.saved_tensors, dq, dk)
    return None if dq is None else one, None if dk is None else two


rotary_bwd = Op(
    "rotary_bwd(Tensor cos, Tensor sin, Tensor? dq, Tensor? dk) -> (Tensor, Tensor)",
    filled(_grads, f"{__package__}.device:rotary_bwd"),
    _grads,
)
rotary_fwd = Op(
    "rotary_fwd(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    filled(_outputs, f"{__package__}.device:rotary_fwd"),
    _outputs,
    setup_context=_setup_context,
    backward=_backward,
)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates each pair of numbers of q and k by the angle of its position.

    Args:
        q: (B, T, H, D), fp32 | fp16 | bf16, D even, up to 256; any strides, read in place where the
            last dimension is contiguous.
        k: (B, T, K, D), dtype of `q`.
        cos: (T, D/2) fp32; takes no gradient.
        sin: (T, D/2) fp32; takes no gradient.

    Returns:
        tuple[Tensor, Tensor]: q and k turned, dtypes kept, contiguous.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    _check(q, k, cos, sin)
    if not runs_kernels(q.device):
        return rotary_plain(q, k, cos, sin)
    return rotary_fwd(q, k, cos, sin)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or x.shape[2] < 1:
            raise ValueError(f"{name}: expected (B, T, heads, D), got {tuple(x.shape)}")
    B, T, _, D = q.shape
    if D % 2 or not 2 <= D <= MAX_D:
        raise ValueError(f"q: expected an even head dimension from 2 to {MAX_D}, got {D}")
    check_float("q", q)
    check_like("k", k, (B, T, k.shape[2], D), (q.dtype,), q)
    for name, x in (("cos", cos), ("sin", sin)):
        check_like(name, x, (T, D // 2), (torch.float32,), q)
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: expected a tensor that requires no grad; it gets none")
