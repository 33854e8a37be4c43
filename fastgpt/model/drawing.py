"""Drawing of the next token from logits (B, V): B rows, V the vocabulary."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

OPTIONS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""Names of the options, in the order in which they are applied."""
COLDEST = 1e-6
"""Lowest temperature that logits are divided by; below it the likeliest token has it all."""


def draw(
    logits: Tensor, seen: Tensor, generator: Generator | Sequence[Generator] | None = None, *,
    repetition_penalty: float = 1.0, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, min_p: float | None = None,
) -> Tensor:  # fmt: skip
    """Draws a token for each row, (B,) int64, from logits on the CPU, fp32.

    The options are those of `generate`.

    Args:
        seen: bool (B, V), tokens that the penalty makes less likely.
        generator: one for all rows, or one for each.
    """
    if repetition_penalty != 1:
        less = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, less, logits)
    if temperature < COLDEST:
        return logits.argmax(-1)
    shares = (logits / temperature).softmax(-1)
    most = 1.0 if top_p is None else top_p
    if top_k is not None or most < 1 or min_p:
        # in order of their size; exactly k even with ties, unlike a threshold
        kept, order = shares.topk(min(top_k or shares.shape[-1], shares.shape[-1]))
        if most < 1:  # the likeliest token always stays: in fp32 p may be 0
            before = (kept.cumsum(-1) - kept) / kept.sum(-1, keepdim=True)
            kept[:, 1:] *= before[:, 1:] < most
        kept *= kept >= (min_p or 0) * kept[:, :1]
        shares = torch.zeros_like(shares).scatter(-1, order, kept)
    if isinstance(generator, Sequence):
        pairs = zip(shares, generator, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in pairs])
    return torch.multinomial(shares, 1, generator=generator)[:, 0]
