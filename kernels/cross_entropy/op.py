"""Cross-entropy of logits with integer targets; softmax in fp32 for logits of any dtype.

Shapes
    logits: (..., V)   targets: (...) int32 | int64, the index of a column
Math
    With z the logits of the columns below `valid_vocab`, capped to softcap * tanh(z / softcap)
    where a cap is given, and lse = log sum exp(z), a row's loss is
        lse - (1 - label_smoothing) z[target] - label_smoothing mean(z) + z_loss lse**2
    Gradient, traffic and what one pass takes: docs/kernels/cross_entropy.md.
Source
    Smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7.  z_loss: Chowdhery et al. 2022,
    arXiv:2204.02311, section 5.  Softmax in one pass: Milakov & Gimelshein 2018, arXiv:1805.02867.

Nothing waits for the device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..checks import INTEGERS, check_float, check_like
from ..runtime import Op, like, no_hooks, runs_kernels
from .cpu import losses_and_gradient_
from .plain import LossOptions, losses_ref

REDUCTIONS = ("mean", "sum", "none")


def count(targets: Tensor, ignore_index: int) -> Tensor:
    """Counts the targets that are not ignored, () fp32, without a host sync."""
    return (targets != ignore_index).sum(dtype=torch.float32)


def reduced(
    losses: Tensor, targets: Tensor, ignore_index: int, reduction: str, n: Tensor | None = None
) -> Tensor:
    """Applies the reduction: a mean or sum over rows, or the losses themselves; n is `count`'s."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / (count(targets, ignore_index) if n is None else n)


def in_place(
    logits: Tensor, targets: Tensor, scale: Tensor | None, options: LossOptions, losses: Tensor
) -> None:
    """Writes the losses (M,); overwrites logits with the gradient of their weighted sum."""
    if not runs_kernels(logits.device):
        losses.copy_(losses_and_gradient_(logits, targets, scale, options))
        return
    from .device import cross_entropy_fwd

    cross_entropy_fwd(logits, targets, options, losses, scale=scale)


def check_options(V: int, reduction: str, valid_vocab: int | None, *values: Any) -> LossOptions:
    """Builds the options for logits with V columns; raises ValueError where they are not valid.

    `values` are the fields of `LossOptions` after `valid_vocab`.
    """
    options = LossOptions(V if valid_vocab is None else valid_vocab, *values)
    if not 1 <= options.valid_vocab <= V:
        raise ValueError(f"valid_vocab: expected 1 to {V} columns, got {options.valid_vocab}")
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected 0 to 1, got {options.label_smoothing}")
    if not options.z_loss >= 0:
        raise ValueError(f"z_loss: expected 0 or more, got {options.z_loss}")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap: expected a number above 0 or None, got {options.softcap}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return options


def cross_entropy_ref(
    logits: Tensor, targets: Tensor, *, valid_vocab: int | None = None, reduction: str = "mean",
    inplace_grad: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """Reference of `cross_entropy` in plain PyTorch, never in place; also accepts fp64."""
    options = LossOptions(logits.shape[-1] if valid_vocab is None else valid_vocab, **others)
    return reduced(losses_ref(logits, targets, options), targets, options.ignore_index, reduction)


def _outputs(logits: Tensor, targets: Tensor, reduction: str, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates the loss, () or (M,), and the softmax statistics of each row (2, M)."""
    M, fp32 = logits.shape[0], {"dtype": torch.float32, "device": logits.device}
    return torch.empty((M,) if reduction == "none" else (), **fp32), torch.empty((2, M), **fp32)


def _fwd(logits: Tensor, targets: Tensor, reduction: str, *options: Any) -> tuple[Tensor, Tensor]:
    # imported when first run: triton is missing on macOS and slow to import
    from .device import cross_entropy_fwd

    losses, stats = _outputs(logits, targets, "none")
    cross_entropy_fwd(logits, targets, LossOptions(*options), losses, stats)
    return reduced(losses, targets, LossOptions(*options).ignore_index, reduction), stats


def _bwd(
    dloss: Tensor, logits: Tensor, targets: Tensor, stats: Tensor, reduction: str, *options: Any,
    dlogits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from .device import cross_entropy_bwd

    if reduction == "mean":
        dloss = dloss / count(targets, LossOptions(*options).ignore_index)
    dlogits = like(logits) if dlogits is None else dlogits
    cross_entropy_bwd(logits, targets, stats, dloss, dlogits, LossOptions(*options))
    return dlogits


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, *ctx.options = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dloss: Tensor, _: None) -> tuple[Tensor]:
    return (_cross_entropy_bwd(dloss, *ctx.saved_tensors, *ctx.options),)


OPTIONS = (
    "SymInt valid_vocab, int ignore_index, float label_smoothing, float z_loss, float? softcap"
)
"""The fields of `LossOptions` in the form of an op schema."""
_cross_entropy_bwd = Op(
    "cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor targets, Tensor stats, "
    f"str reduction, {OPTIONS}) -> Tensor",
    _bwd,
    lambda dloss, logits, *_: like(logits),
)
_cross_entropy_fwd = Op(
    "cross_entropy_fwd(Tensor logits, Tensor targets, "
    f"str reduction, {OPTIONS}) -> (Tensor, Tensor)",
    _fwd,
    _outputs,
    setup_context=_setup_context,
    backward=_backward,
)


class _InPlace(torch.autograd.Function):
    """Losses (M,) whose gradient overwrites the logits; with `early` their mean or sum.

    Where one scale serves all rows, the forward already writes the gradient (`early`): the logits
    go through memory twice instead of three times.
    """

    @staticmethod
    def forward(ctx: Any, /, *args: Any) -> Tensor:
        logits, targets, reduction, options, ctx.early = args
        stats = None
        if ctx.early:
            scale = 1 / count(targets, options.ignore_index) if reduction == "mean" else None
            losses = logits.new_empty(targets.shape, dtype=torch.float32)
            in_place(logits, targets, scale, options, losses)
            increment_version(logits)
            losses = reduced(losses, targets, options.ignore_index, reduction)
        elif runs_kernels(logits.device):
            losses, stats = _fwd(logits, targets, "none", *options)
        else:
            losses = losses_ref(logits, targets, options)
        ctx.options, ctx.spent = options, False
        ctx.save_for_backward(logits, targets, stats)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, /, *gradients: Tensor) -> tuple[Any, ...]:
        (dloss,) = gradients
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy with inplace_grad: no second backward, because the gradient has "
                "overwritten the logits"
            )
        ctx.spent = True
        logits, targets, stats = ctx.saved_tensors
        if stats is not None:
            _bwd(dloss, logits, targets, stats, "none", *ctx.options, dlogits=logits)
        elif not ctx.early:
            losses_and_gradient_(logits, targets, dloss, ctx.options)
        elif runs_kernels(logits.device):
            from .device import cross_entropy_scale_

            cross_entropy_scale_(logits, dloss)
        else:
            logits.mul_(dloss)
        increment_version(logits)
        return logits.detach(), None, None, None, None


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    valid_vocab: int | None = None,
    reduction: str = "mean",
    inplace_grad: bool = False,
) -> Tensor:
    """Computes the cross-entropy in nats of each row of logits with its target.

    A target that is neither a column nor `ignore_index` makes its loss and its row's gradient NaN,
    and so the mean: nothing is read out of bounds, and finding it needs no host sync.

    Args:
        logits: (..., V), fp32 | fp16 | bf16, any strides; copied where rows are not evenly spaced
            or their columns not contiguous.
        targets: (...), int32 | int64, any alignment.
        ignore_index: target whose row does not count; the row is not read and gets the gradient 0.
        label_smoothing: share of each target that is spread evenly over the valid columns.
        z_loss: factor of the squared log-sum-exp that is added to the loss.
        softcap: logits are first squashed to softcap * tanh(logits / softcap).
        valid_vocab: columns from here on are padding; None: V.
        reduction: "mean" over the targets that count (NaN where none does), "sum" or "none".
        inplace_grad: the gradient overwrites the logits, as early as in this call; a second
            backward raises. Under torch.compile, and wherever else calls are traced, it has memory
            of its own.

    Returns:
        Tensor: () fp32, or (...) for "none".

    Raises:
        ValueError: a shape, dtype, device or option is not as above, or `inplace_grad` of logits
            that would have to be copied.
    """
    check_float("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] < 1:
        raise ValueError(f"logits: expected (..., V) with V >= 1, got {tuple(logits.shape)}")
    V = logits.shape[-1]
    check_like("targets", targets, logits.shape[:-1], INTEGERS, logits, "logits")
    options = check_options(
        V, reduction, valid_vocab, ignore_index, label_smoothing, z_loss, softcap
    )
    flat, flat_targets = logits.reshape(-1, V), targets.reshape(-1)
    needs_grad = inplace_grad and logits.requires_grad and torch.is_grad_enabled()
    if needs_grad and not torch.compiler.is_compiling() and no_hooks(logits, targets):
        if flat.data_ptr() != logits.data_ptr() or not _rows_apart(flat):
            raise ValueError(
                "logits: with inplace_grad expected rows that are evenly spaced and contiguous, "
                f"got {tuple(logits.shape)} with strides {logits.stride()}"
            )
        # an fp16 gradient of a mean over many rows, without the loss scale, would round to 0
        early = reduction != "none" and logits.dtype != torch.float16
        losses = _InPlace.apply(flat, flat_targets, reduction, options, early)
        if early:
            return losses
    elif runs_kernels(logits.device):
        loss, _ = _cross_entropy_fwd(flat, flat_targets, reduction, *options)
        return loss.view(targets.shape) if reduction == "none" else loss
    else:
        losses = losses_ref(flat, flat_targets, options)
    loss = reduced(losses, flat_targets, ignore_index, reduction)
    return loss.view(targets.shape) if reduction == "none" else loss


def _rows_apart(logits: Tensor) -> bool:
    """Returns True if columns of (M, V) logits are contiguous and no two rows share memory."""
    (M, V), (row, column) = logits.shape, logits.stride()
    return (column == 1 or V == 1) and (abs(row) >= V or M <= 1)
