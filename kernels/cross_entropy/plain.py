"""Cross-entropy in plain PyTorch: its options, its reference, and an in-place form for CPUs."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

SHRINK = 2.0**-32
"""Factor of the logits that label smoothing adds up, as fp32 sums of some near -3e38 overflow.

A power of two changes no digit.
"""


class LossOptions(NamedTuple):
    """Options of the loss: padding, ignored targets, label smoothing, z-loss, softcap."""

    valid_vocab: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


def losses_ref(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Computes the loss (...) of each row of logits (..., V), in fp32 or wider, with autograd."""
    z = logits[..., : options.valid_vocab]
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    counted = targets != options.ignore_index
    known = (targets >= 0) & (targets < options.valid_vocab)
    logp = F.log_softmax(z, dim=-1)
    losses = -logp.gather(-1, torch.where(known, targets, 0).long()[..., None])[..., 0]
    if options.label_smoothing:
        evenly = -(logp / options.valid_vocab).sum(-1)  # a mean whose sum cannot overflow
        # not torch.lerp, which makes NaN of two infinities
        losses = (1 - options.label_smoothing) * losses + options.label_smoothing * evenly
    if options.z_loss:
        losses = losses + options.z_loss * z.logsumexp(-1).square()
    # multiplied, not selected, so that the gradient is NaN as well
    losses = losses * torch.where(known | ~counted, 1.0, torch.nan)
    return torch.where(counted, losses, 0.0)


# --- in place -------------------------------------------------------------------------------------

BLOCK = 3_300_000
"""Number of logits per block, 13 MB in fp32, so that temporaries fit into a last-level cache.

Smaller blocks fit a smaller cache but gain nothing (10 ms of one thread for 256 rows of GPT-2's,
with 2**19 and with 2**22), and every operation synchronises all threads, which is slow on a busy
machine.
"""


def losses_and_gradient_(
    logits: Tensor, targets: Tensor, scale: Tensor | None, options: LossOptions
) -> Tensor:
    """Returns the losses (M,); overwrites the logits with the gradient of their sum times `scale`.

    Args:
        logits: (M, V).
        targets: (M,).
        scale: () or (M,) fp32; None is 1.
    """
    M, V = logits.shape
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    rows = max(1, BLOCK // V)
    wide = None
    if logits.dtype != torch.float32:
        wide = torch.empty((min(rows, M), V), dtype=torch.float32, device=logits.device)
    for start in range(0, M, rows):
        part = slice(start, start + rows)
        narrow = logits[part]
        z = narrow if wide is None else wide[: narrow.shape[0]].copy_(narrow)
        by_row = scale[part] if scale is not None and scale.dim() else scale
        losses[part] = _block_(z, targets[part], by_row, options)
        if z is not narrow:
            narrow.copy_(z)
    return losses


def _block_(z: Tensor, targets: Tensor, scale: Tensor | None, options: LossOptions) -> Tensor:
    """Computes `losses_and_gradient_` for as many fp32 rows as fit into a cache."""
    valid, ignore_index, smoothing, z_loss, softcap = options
    columns = z[:, :valid]
    slope = None
    if softcap is not None:
        z.div_(softcap).tanh_()
        slope = (1 - z.square())[:, :valid]
        z.mul_(softcap)
    counted = targets != ignore_index
    known = (targets >= 0) & (targets < valid)
    places = torch.where(known, targets, 0).long()[:, None]
    picked = columns.gather(1, places)  # (rows, 1)
    above = _mean_above(columns, picked) if smoothing else 0.0
    top = columns.amax(1, keepdim=True)
    z[:, valid:] = -torch.inf
    torch.softmax(z, 1, out=z)
    logsum = -columns.amax(1, keepdim=True).log()  # the largest probability is exp(0) / sum
    lse = (top + logsum)[:, 0]
    losses = (logsum + (top - picked))[:, 0] - smoothing * above
    losses += z_loss * lse.square() if z_loss else 0.0  # not 0 times the square, which may be inf

    by_row = torch.where(known, 1.0, torch.nan)
    if scale is not None:
        by_row = by_row * scale
    columns.mul_((by_row * (1 + 2 * z_loss * lse))[:, None])
    columns.scatter_add_(1, places, (by_row * (smoothing - 1))[:, None])
    if smoothing:
        columns.sub_((by_row * (smoothing / valid))[:, None])
    if slope is not None:
        columns.mul_(slope)
    z[:, valid:] = 0
    if not counted.all():
        z[~counted] = 0
    return torch.where(counted, losses * torch.where(known, 1.0, torch.nan), 0.0)


def _mean_above(columns: Tensor, picked: Tensor) -> Tensor:
    """Computes the mean over columns (rows, V) of what they are above `picked` (rows, 1)."""
    base = picked.clamp(min=torch.finfo(picked.dtype).min)  # -inf - -inf is NaN
    return torch.add(base * -SHRINK, columns, alpha=SHRINK).mean(1) / SHRINK
