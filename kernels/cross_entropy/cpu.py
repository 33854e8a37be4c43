"""Cross-entropy on a CPU, in place: PyTorch's own ops on blocks of rows that stay in cache."""

import torch
from torch import Tensor

from .plain import SHRINK, LossOptions

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
