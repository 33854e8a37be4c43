"""Bias and activation in one pass; the backward computes the activation again.

Shapes
    x: (..., F), for swiglu (..., 2F) with the gate's half first   bias: as x's last dimension
    y: (..., F)
Math
    z = x + bias, then
    gelu_tanh     z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2
    gelu_erf      z (1 + erf(z / sqrt(2))) / 2
    relu          max(z, 0)
    relu_squared  max(z, 0)^2
    swiglu        silu(first half of z) * second half of z, silu(g) = g / (1 + exp(-g))
    Derivatives and traffic: docs/kernels/bias_act.md.
Source
    GELU: Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2.  SwiGLU: Shazeer 2020,
    arXiv:2002.05202, eq. 6.  ReLU squared: So et al. 2021, arXiv:2109.08668, section 4.

What is saved for the backward is x, before the bias, and the bias. All math is fp32, z is never
rounded. y has the dtype of x, or autocast's where it is on, because what follows an activation is a
matrix product.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..checks import check_float
from ..invariant import elementwise, is_batch_invariant
from ..runtime import Op, autocast_dtype, filled, like, runs_kernels
from ..sums import split_grads


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "swiglu": _swiglu,
}
"""Activation functions of PyTorch by kind."""


def activation(x: Tensor, kind: str) -> Tensor:
    """Computes an activation function of PyTorch: of x (..., F), for "swiglu" (..., 2F)."""
    if not is_batch_invariant():
        return ACTIVATIONS[kind](x)
    if kind == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return elementwise(F.silu, gate) * up
    return elementwise(ACTIVATIONS[kind], x)


def bias_act_ref(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Reference of `bias_act` in plain PyTorch; also accepts fp64."""
    dtype = autocast_dtype(x)
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        z = z + bias.to(z.dtype)
    return activation(z, kind).to(dtype)


def _output(x: Tensor, bias: Tensor | None, kind: str, dtype: torch.dtype) -> Tensor:
    return torch.empty((*x.shape[:-1], _features(x, kind)), dtype=dtype, device=x.device)


def _grads(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Allocates dx, and partial sums of dbias (P, N), (P, 0) if unwanted."""
    from .device import bwd_plan

    N = x.shape[-1]
    _, programs, _ = bwd_plan(x.numel() // N, _features(x, kind), kind, x.device)
    parts = torch.empty((programs, N * wanted), dtype=torch.float32, device=x.device)
    return like(x), parts


def _features(x: Tensor, kind: str) -> int:
    return x.shape[-1] // (2 if kind == "swiglu" else 1)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.kind, _ = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, bias = ctx.saved_tensors
    wanted = ctx.needs_input_grad[1]
    dx, parts = _bias_act_bwd(dy, x, bias, ctx.kind, wanted)
    (dbias,) = split_grads(parts, bias.dtype if wanted else None)
    return dx, dbias


_bias_act_bwd = Op(
    "bias_act_bwd(Tensor dy, Tensor x, Tensor? bias, str kind, bool wanted) -> (Tensor, Tensor)",
    filled(_grads, f"{__package__}.device:bias_act_bwd"),
    _grads,
)
_bias_act_fwd = Op(
    "bias_act_fwd(Tensor x, Tensor? bias, str kind, ScalarType dtype) -> Tensor",
    filled(_output, f"{__package__}.device:bias_act_fwd"),
    _output,
    setup_context=_setup_context,
    backward=_backward,
)


def bias_act(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Computes the activation `kind` of x + bias.

    Args:
        x: (..., F), for "swiglu" (..., 2F) with the gate's half first; fp32 | fp16 | bf16, any
            strides; copied where its rows are not evenly spaced or their elements not contiguous.
        bias: (F,), for "swiglu" (2F,); any of these dtypes; None: no bias.
        kind: "gelu_tanh" | "gelu_erf" | "relu" | "relu_squared" | "swiglu".

    Returns:
        Tensor: (..., F), contiguous, dtype of `x`, or autocast's.

    Raises:
        ValueError: a shape, dtype, device or the kind is not as above.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"kind: expected one of {', '.join(ACTIVATIONS)}, got {kind!r}")
    check_float("x", x)
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ValueError(f"x: expected (..., F) with F >= 1, got {tuple(x.shape)}")
    if kind == "swiglu" and x.shape[-1] % 2:
        raise ValueError(f"x: expected (..., 2F) for swiglu, got {tuple(x.shape)}")
    if bias is not None:
        check_float("bias", bias, x.shape[-1:], x)
    if not runs_kernels(x.device):
        return bias_act_ref(x, bias, kind)
    return _bias_act_fwd(x, bias, kind, autocast_dtype(x))
