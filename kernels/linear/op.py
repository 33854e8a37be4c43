"""Linear layer, which in fp32 on AMD's CPUs multiplies by oneDNN instead of MKL.

PyTorch multiplies fp32 matrices by MKL, which on AMD's processors leaves AVX-512 unused. It ships
oneDNN as well, whose op is the one that Inductor calls. docs/kernels/linear.md has the figures.

Shapes
    x: (..., I)   weight: (O, I)   bias: (O,)   N = rows of x
"""

import functools
import math
import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..invariant import is_batch_invariant, products
from ..runtime import autocast_dtype, no_hooks, without_autocast

LEAST = {True: 2**23, False: 2**19}
"""Least N O I for oneDNN, by whether gradients are computed; below it MKL's calls are shorter."""


@functools.cache
def faster_by_onednn() -> bool:
    """Returns True on an AMD CPU with AVX-512, if this build of PyTorch has oneDNN."""
    info = Path("/proc/cpuinfo")
    vendor = info.read_text(encoding="utf-8") if info.exists() else platform.processor()
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in vendor
    )


def by_onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, differentiated: bool
) -> bool:
    """Returns True if x @ weight.T + bias, and with gradients the products for them, are by oneDNN.

    What F.linear refuses, or broadcasts, is left to it.
    """
    return (
        not torch.compiler.is_compiling()
        and x.dtype == weight.dtype == autocast_dtype(x) == torch.float32
        and weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or (bias.dtype, bias.shape) == (x.dtype, weight.shape[:1]))
        and x.device.type == "cpu"
        and x.numel() * len(weight) >= LEAST[differentiated]
        and faster_by_onednn()
        and torch.backends.mkldnn.enabled  # pyright: ignore
        and no_hooks(x, weight)
    )


def wants_wide_gradients(x: Tensor, weight: Tensor) -> bool:
    """Returns True if CUDA's autocast multiplies an fp32 weight in 16 bits.

    Its gradient would be rounded to 16 bits and widened again by a pass over it. cuBLAS writes fp32
    as well, which moves half of these bytes and rounds once.
    """
    narrows = autocast_dtype(x).itemsize == 2 and weight.dtype == torch.float32
    nvidia = x.is_cuda and torch.version.hip is None
    return nvidia and narrows and weight.dim() == 2 and x.shape[-1:] == weight.shape[1:]


def dense(x: Tensor) -> Tensor:
    """Returns the matrix x if it or its transpose is contiguous, else a copy.

    For a slice of columns oneDNN has no fast code: it took more than a thousand times as long.
    """
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a @ b.T + bias in fp32 by oneDNN: (M, K), (N, K), (N,) to (M, N)."""
    bias = None if bias is None else bias.contiguous()  # its stride is ignored
    return torch.ops.mkldnn._linear_pointwise(dense(a), dense(b), bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(dy, weight.t()) if of_x else None,
            transposed_product(dy, x) if of_weight else None,
            dy.sum(0) if of_bias else None,
        )


class _Wide(torch.autograd.Function):
    """A product in 16 bits whose weight and bias get fp32 gradients, without a rounding between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any) -> Tensor:  # pyright: ignore
        rows, narrow, ctx.of_x = x.to(dtype), weight.to(dtype), x.dtype
        ctx.save_for_backward(rows, narrow)
        return F.linear(rows, narrow, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            (dy @ weight).to(ctx.of_x) if of_x else None,
            torch.mm(dy.t(), x, out_dtype=torch.float32) if of_weight else None,
            dy.sum(0, dtype=torch.float32) if of_bias else None,
            None,
        )


def transposed_product(dy: Tensor, x: Tensor) -> Tensor:
    """Computes dy.T @ x in fp32 by oneDNN: (N, O), (N, I) to (O, I).

    oneDNN is faster if its second operand is the wider one; the result is then turned, which takes
    longer than the product of a few rows.
    """
    if dy.shape[1] > x.shape[1] and len(dy) >= 64:
        return product(x.t(), dy.t()).t().contiguous()
    return product(dy.t(), x.t())


def _linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = autocast_dtype(x)
    with without_autocast(x):
        rows = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1]).to(dtype)
        y = products(rows, weight.to(dtype).t()[None]).view(*x.shape[:-1], len(weight))
        return y if bias is None else y + bias.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x @ weight.T + bias as F.linear does, and its gradients.

    By oneDNN a gradient of a gradient raises.

    Args:
        x: (..., I), floating.
        weight: (O, I).
        bias: (O,).

    Returns:
        Tensor: (..., O), of autocast's dtype if it is on, else of x's.
    """
    if is_batch_invariant():
        return _linear_invariant(x, weight, bias)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    wide = differentiated and wants_wide_gradients(x, weight)
    if not wide and not by_onednn(x, weight, bias, differentiated=differentiated):
        return F.linear(x, weight, bias)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if wide:
        dtype = autocast_dtype(x)
        with torch.autocast("cuda", enabled=False):
            y = _Wide.apply(rows, weight, bias, dtype)
    else:
        y = _Linear.apply(rows, weight, bias) if differentiated else product(rows, weight, bias)
    return y.view(*x.shape[:-1], len(weight))
