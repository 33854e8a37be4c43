"""Drawing of the next token from logits (B, V): B rows, V the vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

COLDEST = 1e-6
"""Lowest temperature that logits are divided by; below it the likeliest token has it all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Options of drawing a token, those of `generate`, applied in the order of the fields."""

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def draw(
        self,
        logits: Tensor,
        generator: Generator | Sequence[Generator] | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Draws a token for each row, (B,) int64, from logits on the CPU, fp32.

        Args:
            generator: one for all rows, or one for each.
            seen: bool (B, V), tokens that the penalty makes less likely; None: no penalty.
        """
        if seen is not None:
            factor = self.repetition_penalty
            less = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(seen, less, logits)
        if self.temperature < COLDEST:
            return logits.argmax(-1)
        kept = _nucleus(_top(logits / self.temperature, self.top_k), self.top_p)
        shares = _likely(kept, self.min_p).softmax(-1)
        if isinstance(generator, Sequence):
            pairs = zip(shares, generator, strict=True)
            return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in pairs])
        return torch.multinomial(shares, 1, generator=generator)[:, 0]

    def seen_in(self, tokens: Tensor, counts: Tensor, vocab_size: int) -> Tensor | None:
        """Returns which tokens rows (B, T) have where `counts`, (B, V); None without a penalty."""
        if self.repetition_penalty == 1:
            return None
        counts = counts & (tokens < vocab_size)
        seen = torch.zeros(len(tokens), vocab_size, dtype=torch.bool)
        seen[counts.nonzero()[:, 0], tokens[counts]] = True
        return seen


def _top(logits: Tensor, k: int | None) -> Tensor:
    """Sets all but the k largest of each row of logits (B, V) to -inf."""
    if k is None or k >= logits.shape[-1]:
        return logits
    values, ids = logits.topk(k)  # exactly k even with ties, unlike a threshold
    return torch.full_like(logits, float("-inf")).scatter(-1, ids, values)


def _nucleus(logits: Tensor, p: float | None) -> Tensor:
    """Sets logits (B, V) outside the smallest set of tokens that reaches probability p to -inf."""
    if p is None or p >= 1:
        return logits
    ordered, order = logits.sort(descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    rest = before >= p
    rest[:, 0] = False  # the likeliest token always stays: in fp32 p may be 0
    return logits.masked_fill(rest.gather(-1, order.argsort(-1)), float("-inf"))


def _likely(logits: Tensor, p: float | None) -> Tensor:
    """Sets logits (B, V) of tokens with less than p of the likeliest's probability to -inf."""
    if not p:
        return logits
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), float("-inf"))
