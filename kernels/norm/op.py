"""LayerNorm and RMSNorm over the last dimension, alone or after a residual sum.

Shapes
    x, residual, y: (..., N)   weight, bias: (N,)
Source
    LayerNorm: Ba, Kiros, Hinton 2016, arXiv:1607.06450, eq. 4.  RMSNorm: Zhang & Sennrich 2019,
    arXiv:1910.07467, eq. 4.  Backward and traffic: docs/kernels/norm.md.

On CUDA, and on CPU tensors in Triton's interpreter, the kernels of `kernels.norm.device` run;
anywhere else the plain form does. Statistics are fp32 and the weights may be: activations in bf16
with weights in fp32 is what autocast meets. y has the dtype of x, or autocast's where it is on,
because what follows a norm is a matrix product; x + residual keeps the dtype torch would give it.
A gradient of a gradient raises.
"""

from typing import Any

import torch
from torch import Tensor

from ..checks import check_float
from ..runtime import autocast_dtype, define_op, runs_kernels

MAX_N = 16_384

# --- references -----------------------------------------------------------------------------------


def _norm_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    dtype = autocast_dtype(x)
    total = x if residual is None else x + residual
    xhat = total.to(torch.promote_types(total.dtype, torch.float32))
    if centred:
        xhat = xhat - xhat.mean(-1, keepdim=True)
    y = xhat * torch.rsqrt(xhat.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(dtype), total


def layer_norm_ref(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Reference of `layer_norm` in plain PyTorch; also accepts fp64."""
    return _norm_ref(x, None, weight, bias, eps, centred=True)[0]


def add_layer_norm_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Reference of `add_layer_norm` in plain PyTorch; also accepts fp64."""
    return _norm_ref(x, residual, weight, bias, eps, centred=True)


def rms_norm_ref(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Reference of `rms_norm` in plain PyTorch; also accepts fp64."""
    return _norm_ref(x, None, weight, None, eps, centred=False)[0]


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Reference of `add_rms_norm` in plain PyTorch; also accepts fp64."""
    return _norm_ref(x, residual, weight, None, eps, centred=False)


# --- ops ------------------------------------------------------------------------------------------
# The kernels are imported when first run: triton is missing on macOS and slow to import.


def _fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .device import norm_fwd

    return norm_fwd(*args)


def _bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .device import norm_bwd

    return norm_bwd(*args)


def _fwd_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0, dtype=dtype)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    stats = x.new_empty((2 if centred else 1, x.numel() // x.shape[-1]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), total, stats


def _bwd_fake(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """Returns uninitialised dx, dresidual, dweight, dbias of these dtypes, for fake tensors."""
    shapes = (x.shape, x.shape, x.shape[-1:], x.shape[-1:])
    return tuple(
        x.new_empty(0 if dtype is None else shape, dtype=dtype or torch.float32)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias = inputs[:4]
    _, total, stats = output
    ctx.save_for_backward(x if residual is None else total, weight, stats)
    ctx.mark_non_differentiable(stats, *(() if residual is not None else (total,)))
    ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, weight, bias))


def _backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: None) -> tuple[Any, ...]:
    x_dtype, residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
    options = (None, None, None)
    if dy is None:  # y was not used
        dx = None if dtotal is None else dtotal.to(x_dtype)
        dresidual = None if dtotal is None else dtotal.to(residual_dtype)
        return dx, dresidual, None, None, *options
    x, weight, stats = ctx.saved_tensors
    apart = residual_dtype is not None and residual_dtype != x_dtype
    dtypes = (
        x_dtype,
        residual_dtype if apart else None,
        weight_dtype if ctx.needs_input_grad[2] else None,
        bias_dtype if ctx.needs_input_grad[3] else None,
    )
    gradients = _norm_bwd(dy, dtotal, x, stats, weight, *dtypes)
    dx, dresidual, dweight, dbias = (
        d if dtype else None for d, dtype in zip(gradients, dtypes, strict=True)
    )
    if residual_dtype and not apart:
        dresidual = dx
    return dx, dresidual, dweight, dbias, *options


_norm_bwd = define_op(
    "norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor stats, Tensor? weight, "
    "ScalarType dx_dtype, ScalarType? dresidual_dtype, ScalarType? dweight_dtype, "
    "ScalarType? dbias_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_norm = define_op(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centred, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias, eps)
    if not runs_kernels(x.device):
        return _norm_ref(x, residual, weight, bias, eps, centred)
    y, total, _ = _norm(x, residual, weight, bias, eps, centred, autocast_dtype(x))
    return y, total


def _check(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    check_float("x", x)
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_N:
        raise ValueError(f"x: expected (..., N) with N from 1 to {MAX_N}, got {tuple(x.shape)}")
    if residual is not None:
        check_float("residual", residual, x.shape, x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_float(name, vector, x.shape[-1:], x)
    if not eps >= 0:
        raise ValueError(f"eps: expected 0 or more, got {eps}")


# --- public ---------------------------------------------------------------------------------------


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
    return _run(x, None, weight, bias, eps, centred=True)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Returns (layer_norm(x + residual), x + residual); each tensor is read once and written once.

    Args:
        x: see `layer_norm`, as are weight, bias and eps.
        residual: shape of `x`, any of the dtypes.

    Returns:
        tuple[Tensor, Tensor]: y in the dtype of `x`, or autocast's, and the sum in the dtype torch
        gives it; the statistics are those of the sum as it is returned.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    return _run(x, residual, weight, bias, eps, centred=True)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Computes x / sqrt(mean(x**2) + eps) * weight; for arguments and result see `layer_norm`."""
    return _run(x, None, weight, None, eps, centred=False)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual); see `add_layer_norm`."""
    return _run(x, residual, weight, None, eps, centred=False)
