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

`input_bias` is a bias that x contains already, put there with its gradient cut off
(`F.linear(x, weight, input_bias.detach())`). It changes no result. Its gradient, the column sums of
x's, costs no pass over the gradient where it is computed together with it.
"""

from typing import Any

import torch
from torch import Tensor

from ..checks import check_float
from ..runtime import autocast_dtype, column_sums, define_op, runs_kernels, with_gradient_of
from ..sums import vectors_of

MAX_N = 16_384

# --- reference ------------------------------------------------------------------------------------


def norm_ref(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    input_bias: Tensor | None = None,
    centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """Reference of all norms in plain PyTorch: returns (y, x + residual); also accepts fp64.

    Args:
        centred: True for LayerNorm, False for RMSNorm.
    """
    dtype = autocast_dtype(x)
    x = with_gradient_of(input_bias, x)
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


# --- ops ------------------------------------------------------------------------------------------
# The kernels are imported when first run: triton is missing on macOS and slow to import.


def _fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .device import norm_fwd

    return norm_fwd(*args[:4], *args[5:])


def _bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .device import norm_bwd

    return norm_bwd(*args)


def _fwd_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
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
    dx_dtype: torch.dtype,
    dresidual_dtype: torch.dtype | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    from .device import bwd_plan

    apart, vectors, N = dresidual_dtype is not None, sum(wanted), x.shape[-1]
    _, programs, _ = bwd_plan(x.numel() // N, N, x.device, apart, vectors)
    dresidual = x.new_empty(x.shape if apart else 0, dtype=dresidual_dtype or dx_dtype)
    parts = x.new_empty((programs, vectors * N), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dx_dtype), dresidual, parts


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight = inputs[:3]
    _, total, stats = output
    ctx.save_for_backward(x if residual is None else total, weight, stats)
    ctx.mark_non_differentiable(stats, *(() if residual is not None else (total,)))
    ctx.dtypes = tuple(None if t is None else t.dtype for t in inputs[:5])


def _backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _: None) -> tuple[Any, ...]:
    x_dtype, residual_dtype = ctx.dtypes[:2]
    options = (None, None, None)
    if dy is None:  # y was not used
        if dtotal is None:
            return (None,) * 8
        sums = column_sums(dtotal, ctx.dtypes[4]) if ctx.needs_input_grad[4] else None
        return dtotal.to(x_dtype), dtotal.to(residual_dtype), None, None, sums, *options
    x, weight, stats = ctx.saved_tensors
    apart = residual_dtype is not None and residual_dtype != x_dtype
    wanted = ctx.needs_input_grad[2:5]
    dtypes = (x_dtype, residual_dtype if apart else None)
    dx, dresidual, parts = _norm_bwd(dy, dtotal, x, stats, weight, *dtypes, list(wanted))
    if not apart:
        dresidual = dx if residual_dtype else None
    of_vectors = (dtype if it else None for dtype, it in zip(ctx.dtypes[2:], wanted, strict=True))
    return dx, dresidual, *vectors_of([parts], *of_vectors), *options


_norm_bwd = define_op(
    "norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor stats, Tensor? weight, "
    "ScalarType dx_dtype, ScalarType? dresidual_dtype, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_norm = define_op(
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? input_bias, "
    "float eps, bool centred, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
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
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(x, residual, eps, weight=weight, bias=bias, input_bias=input_bias)
    if not runs_kernels(x.device):
        return norm_ref(
            x, weight, bias, eps, residual=residual, input_bias=input_bias, centred=centred
        )
    dtype = autocast_dtype(x)
    y, total, _ = _norm(x, residual, weight, bias, input_bias, eps, centred, dtype)
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
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (layer_norm(x + residual), x + residual); each tensor is read once and written once.

    Args:
        x: see `layer_norm`, as are weight, bias and eps.
        residual: shape of `x`, any of the dtypes.
        input_bias: (N,), any of the dtypes; a bias that `x` contains already, which gets the column
            sums of its gradient.

    Returns:
        tuple[Tensor, Tensor]: y in the dtype of `x`, or autocast's, and the sum in the dtype torch
        gives it; the statistics are those of the sum as it is returned.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    return _run(x, residual, weight, bias, eps, True, input_bias)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Computes x / sqrt(mean(x**2) + eps) * weight; for arguments and result see `layer_norm`."""
    return _run(x, None, weight, None, eps, centred=False)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual); see `add_layer_norm`."""
    return _run(x, residual, weight, None, eps, False, input_bias)
