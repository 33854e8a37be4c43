"""Cross-entropy in plain PyTorch: its options and its reference."""

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
