"""LayerNorm and RMSNorm over the last dimension, alone or after a residual sum.

Shapes
    x, residual, y: (..., N)   weight, bias: (N,)
Source
    LayerNorm: Ba, Kiros, Hinton 2016, arXiv:1607.06450, eq. 4.  RMSNorm: Zhang & Sennrich 2019,
    arXiv:1910.07467, eq. 4.  Backward and traffic: docs/kernels/norm.md.

Statistics are fp32 and the weights may be: activations in bf16 with weights in fp32 is what
autocast meets. y has the dtype of x, or autocast's where it is on, because what follows a norm is a
matrix product; the sum keeps the dtype torch gives x + residual.

`x_bias` is the bias of the projection that computes x. Where the norm adds it, its gradient, the
column sums of x's, needs no pass of its own over that gradient.
"""

from typing import Any

import torch
from torch import Tensor

from ..checks import check_float
from ..runtime import Op, autocast_dtype, filled, runs_kernels
from ..sums import split_grads

MAX_N = 16_384


def norm_ref(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    residual: Tensor | None = None, x_bias: Tensor | None = None, centred: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reference of all norms in plain PyTorch: returns (y, x + x_bias + residual), also in fp64.

    Args:
        centred: True for LayerNorm, False for RMSNorm.
    """
    dtype = autocast_dtype(x)
    total = x if residual is None else residual_sum(x, x_bias, residual)
    xhat = total.to(torch.promote_types(total.dtype, torch.float32))
    if centred:
        xhat = xhat - xhat.mean(-1, keepdim=True)
    y = xhat * torch.rsqrt(xhat.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(dtype), total


def residual_sum(x: Tensor, x_bias: Tensor | None, residual: Tensor) -> Tensor:
    """Computes x + x_bias + residual, rounded once, to the dtype torch gives x + residual."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if x_bias is not None:
        x = x + x_bias.to(torch.promote_types(dtype, torch.float32))
    return (x + residual).to(dtype)


def _outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Allocates y, the sum with the residual, empty without one, and the row statistics."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(0, dtype=dtype, device=x.device)
    if residual is not None:
        summed = torch.promote_types(x.dtype, residual.dtype)
        total = torch.empty(x.shape, dtype=summed, device=x.device)
    rows = x.numel() // x.shape[-1]
    stats = torch.empty((2 if centred else 1, rows), dtype=torch.float32, device=x.device)
    return y, total, stats


def _grads(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None,
    dx_dtype: torch.dtype, dresidual_dtype: torch.dtype | None, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Allocates dx, dresidual and parts.

    dresidual is empty without a dtype for it. parts (P, V N) fp32 are partial sums of the V wanted
    ones of dweight, dbias and dx_bias.
    """
    from .device import bwd_plan

    apart, vectors, N = dresidual_dtype is not None, sum(wanted), x.shape[-1]
    _, programs, _ = bwd_plan(x.numel() // N, N, x.device, apart, vectors)
    dx = torch.empty(x.shape, dtype=dx_dtype, device=x.device)
    dresidual = torch.empty(
        x.shape if apart else 0, dtype=dresidual_dtype or dx_dtype, device=x.device
    )
    return dx, dresidual, torch.empty((programs, vectors * N), device=x.device, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight = inputs[:3]
    _, total, stats = output
    ctx.save_for_backward(x if residual is None else total, weight, stats)
    ctx.mark_non_differentiable(stats, *(() if residual is not None else (total,)))
    ctx.dtypes = tuple(None if t is None else t.dtype for t in inputs[:5])


def _backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: None) -> tuple[Any, ...]:
    x_dtype, residual_dtype = ctx.dtypes[:2]
    if dy is None:  # y was not used
        assert dtotal is not None
        dx_bias = None
        if ctx.needs_input_grad[4]:
            rows = dtotal.reshape(-1, dtotal.shape[-1])
            dx_bias = rows.sum(0, dtype=torch.float32).to(ctx.dtypes[4])
        return dtotal.to(x_dtype), dtotal.to(residual_dtype), None, None, dx_bias
    x, weight, stats = ctx.saved_tensors
    apart = residual_dtype is not None and residual_dtype != x_dtype
    wanted = ctx.needs_input_grad[2:5]
    dtypes = (x_dtype, residual_dtype if apart else None)
    dx, dresidual, parts = _norm_bwd(dy, dtotal, x, stats, weight, *dtypes, list(wanted))
    if not apart:
        dresidual = dx if residual_dtype else None
    of_vectors = (dtype if it else None for dtype, it in zip(ctx.dtypes[2:], wanted, strict=True))
    return dx, dresidual, *split_grads(parts, *of_vectors)


_norm_bwd = Op(
    "norm_bwd(Tensor dy, Tensor? dtotal, Tensor x, Tensor stats, Tensor? weight, "
    "ScalarType dx_dtype, ScalarType? dresidual_dtype, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor)",
    filled(_grads, f"{__package__}.device:norm_bwd"),
    _grads,
)
_norm_fwd = Op(
    "norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? x_bias, "
    "float eps, bool centred, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    filled(_outputs, f"{__package__}.device:norm_fwd"),
    _outputs,
    setup_context=_setup_context,
    backward=_backward,
)


def run(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None = None, *, eps: float, centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes any of the norms, as `norm_ref` does."""
    _check(x, residual, eps, weight=weight, bias=bias, x_bias=x_bias)
    if not runs_kernels(x.device):
        return norm_ref(x, weight, bias, eps, residual=residual, x_bias=x_bias, centred=centred)
    dtype = autocast_dtype(x)
    y, total, _ = _norm_fwd(x, residual, weight, bias, x_bias, eps, centred, dtype)
    return y, total


def _check(x: Tensor, residual: Tensor | None, eps: float, **vectors: Tensor | None) -> None:
    check_float("x", x)
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_N:
        raise ValueError(f"x: expected (..., N) with N from 1 to {MAX_N}, got {tuple(x.shape)}")
    if residual is not None:
        check_float("residual", residual, x.shape, x)
    for name, vector in vectors.items():
        if vector is not None:
            check_float(name, vector, x.shape[-1:], x)
    if not eps >= 0:
        raise ValueError(f"eps: expected 0 or more, got {eps}")


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Args:
        x: (..., N), fp32 | fp16 | bf16, N up to 16384, any strides; copied where its rows are not
            evenly spaced or their elements not contiguous.
        weight: (N,), any of these dtypes.
        bias: (N,), any of these dtypes.
        eps: added to the variance.

    Returns:
        Tensor: (..., N), contiguous, dtype of `x`, or autocast's.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    return run(x, None, weight, bias, eps=eps, centred=True)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    x_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (layer_norm(total), total) for total = x + x_bias + residual.

    Each tensor is read once and written once.

    Args:
        x: see `layer_norm`, as are weight, bias and eps.
        residual: shape of `x`, any of the dtypes.
        x_bias: (N,), any of the dtypes; the bias of the projection that computes x.

    Returns:
        tuple[Tensor, Tensor]: y in the dtype of `x`, or autocast's, and the sum in the dtype torch
        gives x + residual; the statistics are those of the sum as it is returned.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    return run(x, residual, weight, bias, x_bias, eps=eps, centred=True)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Computes x / sqrt(mean(x**2) + eps) * weight; for arguments and result see `layer_norm`."""
    return run(x, None, weight, None, eps=eps, centred=False)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    x_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(total), total) for total = x + x_bias + residual; see `add_layer_norm`."""
    return run(x, residual, weight, None, x_bias, eps=eps, centred=False)
