"""The output head and its loss, without the logits of all tokens ever being there at once.

Shapes
    x: (..., C)   weight: (V, C)   bias: (V,)   targets: (...) int32 | int64
    M = tokens.  The logits of `chunk_tokens` tokens exist at a time, and their gradient takes
    their place.
Source
    That the logits of all tokens need never exist: Wijmans et al. 2024, arXiv:2411.09009, who
    compute them once more in the backward. Traffic and what did not help: docs/kernels.md.

A loss that is one number has gradients known but for a factor, so the forward computes them while
it has the logits: three matrix products a chunk and not four; the backward multiplies by the
factor. With reduction "none" every row has a factor of its own, and the backward computes the
logits anew.

The same code runs everywhere; between the matrix products, on CUDA and in Triton's interpreter, it
is the kernels of `kernels.cross_entropy.device` that turn logits into gradients, elsewhere plain
PyTorch. Nothing waits for the device. A gradient of a gradient raises.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..checks import DTYPES
from ..runtime import autocast_dtype, define_op, undisturbed
from .chunks import Wanted, run
from .op import (
    OPTIONS,
    check_options,
    check_targets,
    count,
    cross_entropy_ref,
    reduced,
)
from .plain import Options

# --- reference ------------------------------------------------------------------------------------


def linear_cross_entropy_ref(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    **options: Any,
) -> Tensor:
    """The contract of `linear_cross_entropy` in plain PyTorch, all logits at once; fp64 as well."""
    dtype = autocast_dtype(x)
    bias = None if bias is None else bias.to(dtype)
    return cross_entropy_ref(F.linear(x.to(dtype), weight.to(dtype), bias), targets, **options)


# --- op -------------------------------------------------------------------------------------------


def _fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, scale, gradients of x, weight and bias still to be multiplied by scale).

    The mean's 1 / n is split as 2**-e / m, m from 1/2 to 1. The logits' gradients are divided by m
    at once and stay about as large as they are, which fp16 needs; what is left to the backward is
    a power of two, by which a gradient is multiplied without being rounded once more. With `once`
    the backward may do so in place: the caller looks at nothing but the loss.
    """
    wanted, reduction, options = Wanted(*rest[:5]), rest[5], Options(*rest[7:])
    targets = targets.reshape(-1).contiguous()
    factor = scale = None
    if reduction == "mean":
        mantissa, exponent = torch.frexp(count(targets, options.ignore_index))
        factor, scale = 1 / mantissa, torch.ldexp(torch.ones_like(mantissa), -exponent)
    losses, grads = run(x, weight, bias, targets, factor, wanted, options)
    if scale is None:
        scale = torch.ones((), device=x.device)
    loss = reduced(losses, targets, options.ignore_index, reduction)
    dx = grads.x.view(x.shape) if wanted.of_x else grads.x
    return loss, scale, dx, grads.weight, grads.bias


def _fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    fp32, wanted, reduction = torch.float32, Wanted(*rest[:5]), rest[5]
    return (
        x.new_empty((targets.numel(),) if reduction == "none" else (), dtype=fp32),
        x.new_empty((), dtype=fp32),
        x.new_empty(x.shape if wanted.of_x else (0,), dtype=wanted.dtype),
        x.new_empty(weight.shape if wanted.of_weight else (0,), dtype=fp32),
        x.new_empty(weight.shape[:1] if wanted.of_bias else (0,), dtype=fp32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, targets, *_, ctx.dtype, ctx.chunk_tokens, ctx.reduction, ctx.once = inputs[:11]
    ctx.options = inputs[11:]
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.gradients = None if ctx.reduction == "none" else gradients
    ctx.save_for_backward(x, weight, bias, targets)


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[:3]
    grads: tuple[Any, ...] = (None, None, None)
    if dloss is not None and ctx.gradients is None:  # never computed, or given away
        x, weight, bias, targets = ctx.saved_tensors
        if ctx.reduction == "mean":
            dloss = dloss / count(targets, ctx.options[1])
        grads = _again(
            dloss, x, weight, bias, targets, *needed, ctx.dtype, ctx.chunk_tokens, *ctx.options
        )
    elif dloss is not None:
        dtypes = (t if t is None else t.dtype for t in ctx.saved_tensors[:3])
        dtypes = [dtype or torch.float32 for dtype in dtypes]
        if torch.is_grad_enabled() or not (ctx.once and undisturbed(dloss)):
            grads = _scaled(dloss, *ctx.gradients, *dtypes)
        else:  # no second copy of them is ever there; another backward computes them again
            grads = _scaled_(dloss, *ctx.gradients, *dtypes)
            ctx.gradients = None
    asked = (grad if is_needed else None for grad, is_needed in zip(grads, needed, strict=True))
    return *asked, *((None,) * (8 + len(ctx.options)))


def _scaled_(
    dloss: Tensor,
    scale: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    *dtypes: torch.dtype,
) -> tuple[Tensor, ...]:
    """The gradients times dloss and scale, in their own memory where they are in fp32 already."""
    scale = scale * dloss
    # multiplied in fp32 and rounded once: in bf16 the scale itself would be
    grads = (grad.float().mul_(scale) for grad in (dx, dweight, dbias))
    return tuple(grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True))


def _scaled_bwd(dloss: Tensor, scale: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    copies = (grad.to(torch.float32, copy=True) for grad in rest[:3])
    return _scaled_(dloss, scale, *copies, *rest[3:])


def _scaled_bwd_fake(dloss: Tensor, scale: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    of = zip(rest[:3], rest[3:], strict=True)
    return tuple(torch.empty_like(grad, dtype=dtype) for grad, dtype in of)


def _again_bwd(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted, options = Wanted(*rest[:5]), Options(*rest[5:])
    targets = targets.reshape(-1).contiguous()
    _, grads = run(x, weight, bias, targets, dlosses, wanted, options)
    dx = grads.x.to(x.dtype)
    dbias = grads.bias if bias is None else grads.bias.to(bias.dtype)
    return dx.view(x.shape) if wanted.of_x else dx, grads.weight.to(weight.dtype), dbias


def _again_bwd_fake(
    dlosses: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = Wanted(*rest[:5])
    dbias_shape = weight.shape[:1] if wanted.of_bias else (0,)
    return (
        x.new_empty(x.shape if wanted.of_x else (0,)),
        weight.new_empty(weight.shape if wanted.of_weight else (0,)),
        (weight if bias is None else bias).new_empty(dbias_shape),
    )


WANTED = "bool of_x, bool of_weight, bool of_bias, ScalarType dtype, int chunk_tokens"
_scaled = define_op(
    "linear_cross_entropy_scaled(Tensor dloss, Tensor scale, Tensor dx, Tensor dweight, "
    "Tensor dbias, ScalarType x_dtype, ScalarType weight_dtype, ScalarType bias_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _scaled_bwd,
    _scaled_bwd_fake,
)
_again = define_op(
    "linear_cross_entropy_again(Tensor dlosses, Tensor x, Tensor weight, Tensor? bias, "
    f"Tensor targets, {WANTED}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _again_bwd,
    _again_bwd_fake,
)
_linear_cross_entropy = define_op(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor targets, "
    f"{WANTED}, str reduction, bool once, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    setup_context=_setup_context,
    backward=_backward,
)


# --- public ---------------------------------------------------------------------------------------


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """cross_entropy(x @ weight.T + bias, targets), the logits a chunk of tokens at a time.

    With "mean" and "sum" the forward computes the gradients, too, of what requires them; under
    `torch.no_grad` it does not. The matrix products are in the dtype of `x`, or autocast's; losses,
    and the sums over tokens that make the weight's gradient, are in fp32.

    Args:
        x: (..., C), fp32 | fp16 | bf16.
        weight: (V, C), any of these dtypes; it may be tied to another use of it.
        targets: (...), int32 | int64; see `cross_entropy`, also for one that is out of range.
        bias: (V,), any of these dtypes.
        chunk_tokens: tokens whose logits exist at a time; None: what CHUNK_BYTES holds.
        ignore_index: see `cross_entropy`, as all that follow.
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
    _check(x, weight, bias, chunk_tokens)
    check_targets(targets, x.shape[:-1], x, "x")
    V = weight.shape[0]
    valid = V if valid_vocab is None else valid_vocab
    options = Options(valid, ignore_index, label_smoothing, z_loss, softcap)
    check_options(options, reduction, V)
    early = torch.is_grad_enabled() and reduction != "none"
    wanted = (early and t is not None and t.requires_grad for t in (x, weight, bias))
    dtype, chunk, once = autocast_dtype(x), chunk_tokens or 0, True
    loss, *_ = _linear_cross_entropy(
        x, weight, bias, targets, *wanted, dtype, chunk, reduction, once, *options
    )
    return loss.view(targets.shape) if reduction == "none" else loss


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, chunk_tokens: int | None) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"x: expected fp32, fp16 or bf16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ValueError(f"x: expected (..., C) with C >= 1, got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected (V, {x.shape[-1]}), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected ({weight.shape[0]},), got {tuple(bias.shape)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype not in DTYPES:
            raise ValueError(f"{name}: expected fp32, fp16 or bf16, got {t.dtype}")
        if t is not None and t.device != x.device:
            raise ValueError(f"{name}: expected {x.device} as x, got {t.device}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: expected 1 or more, or None, got {chunk_tokens}")
