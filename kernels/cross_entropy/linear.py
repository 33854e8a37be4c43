"""The output head and its loss in one op, which never holds the logits of all tokens at once.

Shapes
    x: (..., C)   weight: (V, C)   bias: (V,)   targets: (...) int32 | int64
    M = tokens.  The logits of `chunk_tokens` tokens exist at a time, and their gradient
    overwrites them.
Source
    Loss without the logits of all tokens: Wijmans et al. 2024, arXiv:2411.09009, who compute them
    once more in the backward. Traffic: docs/kernels/linear_cross_entropy.md.

For a loss that is one number the gradients are known up to a factor, so the forward computes them
while it has the logits: three matrix products for each chunk instead of four; the backward
multiplies by the factor. With reduction "none" every row has a factor of its own, and the backward
computes the logits again.

The same code runs everywhere; between the matrix products, logits become gradients by the kernels
of `kernels.cross_entropy.device` on CUDA and in Triton's interpreter, elsewhere by plain PyTorch.
There is no host sync. A gradient of a gradient raises.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..checks import INTEGERS, check_float, check_like
from ..linear.op import by_onednn, product
from ..runtime import Op, autocast_dtype, no_hooks
from .chunks import tokens_at_a_time
from .op import OPTIONS, check_options, count, cross_entropy_ref, in_place, reduced
from .plain import LossOptions


def linear_cross_entropy_ref(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
    chunk_tokens: int | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Reference of `linear_cross_entropy` in plain PyTorch, all logits at once; also takes fp64."""
    dtype = autocast_dtype(x)
    bias = None if bias is None else bias.to(dtype)
    return cross_entropy_ref(F.linear(x.to(dtype), weight.to(dtype), bias), targets, **options)


# --- losses and gradients -------------------------------------------------------------------------

SETTINGS = f"bool[] wanted, ScalarType dtype, int chunk_tokens, {OPTIONS}"
"""Arguments of the ops after their tensors, in the form of a schema: which gradients of x, weight
and bias are wanted, the dtype of the matrix products, the number of tokens whose logits are
computed at a time (0: what suits the device), and the fields of `LossOptions`."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of x, weight and bias; an empty tensor stands for one that is not wanted."""


def empty_gradients(x: Tensor, weight: Tensor, wanted: list[bool], *dtypes: Any) -> Gradients:
    """Allocates the gradients that are wanted, in `dtypes`."""
    shapes = (x.shape, weight.shape, weight.shape[:1])
    dx, dweight, dbias = (
        torch.empty(shape if is_wanted else (0,), dtype=dtype, device=x.device)
        for is_wanted, shape, dtype in zip(wanted, shapes, dtypes, strict=True)
    )
    return dx, dweight, dbias


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None,
    wanted: list[bool], dtype: torch.dtype, chunk_tokens: int, *options: Any,
) -> tuple[Tensor, Gradients]:  # fmt: skip
    """Computes the losses (M,), and gradients of their sum weighted by `scale`, by chunks.

    The gradient of x has the dtype of the products; those of weight and bias are summed in fp32.
    """
    V, C = weight.shape
    rows, targets = x.reshape(-1, C).to(dtype), targets.reshape(-1)
    M = rows.shape[0]
    losses = torch.empty(M, dtype=torch.float32, device=x.device)
    grads = empty_gradients(x, weight, wanted, dtype, torch.float32, torch.float32)
    dx, dweight, dbias = grads[0].view(-1, C), *grads[1:]
    if M == 0:
        dweight.zero_()
        dbias.zero_()
        return losses, grads
    across = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    chunk = tokens_at_a_time(rows, weight, chunk_tokens)
    onednn = by_onednn(rows, across, differentiated=True)
    memory = torch.empty((min(chunk, M), 0 if onednn else V), dtype=dtype, device=x.device)
    for start in range(0, M, chunk):
        part = slice(start, min(start + chunk, M))
        logits = memory[: part.stop - start]
        if onednn:
            logits = product(rows[part], across, bias)
        elif bias is None:
            torch.mm(rows[part], across.t(), out=logits)
        else:
            torch.addmm(bias, rows[part], across.t(), out=logits)
        by_row = scale[part] if scale is not None and scale.dim() else scale
        in_place(logits, targets[part], by_row, LossOptions(*options), losses[part])
        if wanted[0] and onednn:
            dx[part] = product(logits, across.t())
        elif wanted[0]:
            torch.mm(logits, across, out=dx[part])
        if wanted[1]:
            # oneDNN cannot add to what is there: its product of (V, C) would be a second one
            _accumulate_product(dweight, logits.t(), rows[part], first=start == 0)
        if wanted[2]:
            summed = logits.sum(0, dtype=torch.float32)
            dbias.copy_(summed) if start == 0 else dbias.add_(summed)
    return losses, grads


def _accumulate_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Computes total += a @ b in fp32; the first product overwrites `total` without reading it."""
    beta = 0 if first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # on a CPU a bf16 product is bf16: a few rows at a time stay in cache
        memory = a.new_empty((min(8192, total.shape[0]), total.shape[1]))
        for start in range(0, total.shape[0], 8192):
            part = total[start : start + 8192]
            product = torch.mm(a[start : start + 8192], b, out=memory[: part.shape[0]])
            part.copy_(product) if first else part.add_(product)


# --- ops ------------------------------------------------------------------------------------------


def _fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str, once: bool,
    *settings: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns (loss, scale, dx, dweight, dbias); the backward multiplies the gradients by `scale`.

    The mean's 1 / n is split as 2**-e / m, m from 1/2 to 1. The logits' gradients are divided by m
    at once and keep their magnitude, which fp16 needs; the backward multiplies by the remaining
    power of two, without another rounding. With `once` the backward may do so in place, because the
    caller uses nothing but the loss.
    """
    ignore_index = LossOptions(*settings[3:]).ignore_index
    if reduction == "mean":
        n = count(targets, ignore_index)
        mantissa, _ = torch.frexp(n)
        factor, scale = mantissa.reciprocal(), mantissa / n.clamp(min=1)  # the quotient is exact
    else:
        factor, scale, n = None, torch.ones((), device=x.device), None
    losses, grads = run(x, weight, bias, targets, factor, *settings)
    return reduced(losses, targets, ignore_index, reduction, n), scale, *grads


def _fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str, once: bool,
    wanted: list[bool], dtype: torch.dtype, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    fp32 = torch.float32
    loss = x.new_empty((targets.numel(),) if reduction == "none" else (), dtype=fp32)
    grads = empty_gradients(x, weight, wanted, dtype, fp32, fp32)
    return loss, x.new_empty((), dtype=fp32), *grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.reduction, ctx.once = inputs[:6]
    ctx.settings = inputs[7:]  # all but what is wanted
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.gradients = None if ctx.reduction == "none" else gradients
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dloss: Tensor, *_: None) -> tuple[Any, ...]:
    x, weight, bias, targets = ctx.saved_tensors
    needed, dtypes = ctx.needs_input_grad[:3], _dtypes(x, weight, bias)
    if ctx.gradients is None:  # never computed, or already returned
        if ctx.reduction == "mean":
            dloss = dloss / count(targets, LossOptions(*ctx.settings[2:]).ignore_index)
        grads = _linear_cross_entropy_bwd(
            dloss, x, weight, bias, targets, list(needed), *ctx.settings
        )
    elif torch.compiler.is_compiling():  # the compiler fuses it with what comes next
        grads = _scaled(dloss, *ctx.gradients, *dtypes)
    elif torch.is_grad_enabled() or not (ctx.once and no_hooks(dloss)):
        grads = _linear_cross_entropy_bwd_scaled(dloss, *ctx.gradients, *dtypes)
    else:  # keeps no second copy; another backward computes them again
        grads = _scaled(dloss, *ctx.gradients, *dtypes, overwrite=True)
        ctx.gradients = None
    return tuple(grad if is_needed else None for grad, is_needed in zip(grads, needed, strict=True))


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype, ...]:
    return tuple(torch.float32 if t is None else t.dtype for t in tensors)


def _scaled(
    dloss: Tensor, scale: Tensor, *rest: Any, overwrite: bool = False
) -> tuple[Tensor, ...]:
    """Multiplies three stored gradients by dloss and scale.

    Args:
        rest: the gradients, and the dtypes that they are wanted in.
        overwrite: what is stored may change.
    """
    scale = scale * dloss
    # multiplied in fp32 and rounded once: bf16 would round the scale, too
    grads = (x.float().mul_(scale) if overwrite else x.float() * scale for x in rest[:3])
    return tuple(grad.to(dtype) for grad, dtype in zip(grads, rest[3:], strict=True))


def _bwd(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *settings: Any
) -> tuple[Tensor, ...]:
    _, grads = run(x, weight, bias, targets, dlosses, *settings)
    of = zip(grads, _dtypes(x, weight, bias), strict=True)
    return tuple(grad.to(dtype) for grad, dtype in of)


def _bwd_fake(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
    wanted: list[bool], *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return empty_gradients(x, weight, wanted, *_dtypes(x, weight, bias))


_linear_cross_entropy_bwd_scaled = Op(
    "linear_cross_entropy_bwd_scaled(Tensor dloss, Tensor scale, Tensor dx, Tensor dweight, "
    "Tensor dbias, ScalarType x_dtype, ScalarType weight_dtype, ScalarType bias_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _scaled,
    _scaled,
)
_linear_cross_entropy_bwd = Op(
    "linear_cross_entropy_bwd(Tensor dlosses, Tensor x, Tensor weight, Tensor? bias, "
    f"Tensor targets, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_linear_cross_entropy_fwd = Op(
    "linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor targets, "
    f"str reduction, bool once, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes cross_entropy(x @ weight.T + bias, targets) with the logits of one chunk at a time.

    With "mean" and "sum" the forward also computes the gradients that are required, except under
    `torch.no_grad`. The matrix products are in the dtype of `x`, or autocast's; the losses, and the
    sums over tokens that make the weight's gradient, are in fp32.

    Args:
        x: (..., C), fp32 | fp16 | bf16.
        weight: (V, C), any of these dtypes; it may be tied to the token embedding.
        targets: (...), int32 | int64; see `cross_entropy`, also for one that is out of range.
        bias: (V,), any of these dtypes.
        chunk_tokens: tokens whose logits exist at a time; None: what suits the device.
        ignore_index: see `cross_entropy`, like all that follow.
        label_smoothing: in [0, 1].
        z_loss: 0 or more.
        softcap: above 0, or None.
        valid_vocab: rows of `weight` from here on are padding and get the gradient 0.
        reduction: "mean", "sum", or "none", whose backward computes the logits once more.

    Returns:
        Tensor: () fp32, or (...) for "none".

    Raises:
        ValueError: a shape, dtype, device or option is not as above.
    """
    check_float("x", x)
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ValueError(f"x: expected (..., C) with C >= 1, got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected (V, {x.shape[-1]}), got {tuple(weight.shape)}")
    V = weight.shape[0]
    check_float("weight", weight, like=x)
    if bias is not None:
        check_float("bias", bias, (V,), like=x)
    check_like("targets", targets, x.shape[:-1], INTEGERS, x, "x")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected 1 or more, or None, got {chunk_tokens}")
    options = check_options(
        V, reduction, valid_vocab, ignore_index, label_smoothing, z_loss, softcap
    )
    early = torch.is_grad_enabled() and reduction != "none"
    wanted = [early and t is not None and t.requires_grad for t in (x, weight, bias)]
    # a dispatch mode may keep the gradients that the op returns with the loss
    once = torch.compiler.is_compiling() or no_hooks(x, weight, targets)
    loss, *_ = _linear_cross_entropy_fwd(
        x, weight, bias, targets, reduction, once,
        wanted, autocast_dtype(x), chunk_tokens or 0, *options,
    )  # fmt: skip
    return loss.view(targets.shape) if reduction == "none" else loss
