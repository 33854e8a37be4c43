"""Drawing of the next token from logits (B, V): B rows, V the vocabulary."""

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from fastgpt.errors import UserError

OPTIONS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""Names of the options, in the order in which they are applied."""
COLDEST = 1e-6
"""Lowest temperature that logits are divided by; below it the likeliest token has it all."""


def check_options(
    *, max_new_tokens: int, repetition_penalty: float = 1.0, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
) -> None:  # fmt: skip
    """Raises `UserError` that names an option, which has the name that `generate` gives it."""
    for name, value, right, expected in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 0, "0 or more"),
        ("temperature", temperature, 0 <= temperature < math.inf, "0 or more"),
        ("repetition_penalty", repetition_penalty, 0 < repetition_penalty < math.inf, "above 0"),
        ("top_k", top_k, top_k is None or top_k >= 1, "1 or more, or None"),
        ("top_p", top_p, top_p is None or 0 <= top_p <= 1, "0 to 1, or None"),
        ("min_p", min_p, min_p is None or 0 <= min_p <= 1, "0 to 1, or None"),
    ):
        if not right:
            raise UserError(f"{name} is {value}: expected {expected}")


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
        top, order = shares.topk(min(top_k or shares.shape[-1], shares.shape[-1]))
        if most < 1:  # the likeliest token always stays: in fp32 p may be 0
            before = (top.cumsum(-1) - top) / top.sum(-1, keepdim=True)
            top[:, 1:] *= before[:, 1:] < most
        top *= top >= (min_p or 0) * top[:, :1]
        shares = torch.zeros_like(shares).scatter(-1, order, top)
    if isinstance(generator, Sequence):
        pairs = zip(shares, generator, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=of_row) for row, of_row in pairs])
    return torch.multinomial(shares, 1, generator=generator)[:, 0]
