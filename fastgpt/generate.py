"""Sampling: one token after another from the model's own distribution."""

import torch
from torch import Tensor

from fastgpt.model import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continues each row of `tokens`; the model sees the last `context` tokens.

    Args:
        model: in evaluation mode.
        tokens: (B, T) int64 prompts of equal length, T >= 1.
        max_new_tokens: how many to add.
        vocab_size: ids from here on are never drawn (the tokenizer has no text for them).
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of tokens whose probability reaches p only (Holtzman et
            al. 2019).
        generator: of random numbers, on the CPU.

    Returns:
        Tensor: (B, T + max_new_tokens).
    """
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -model.config.context :])[:, -1, :vocab_size].float().cpu()
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            kept = _nucleus(_top(logits / temperature, top_k), top_p)
            drawn = torch.multinomial(kept.softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
    return tokens


def _top(logits: Tensor, k: int | None) -> Tensor:
    """Logits (B, V) with all but the k largest of each row at -inf."""
    if k is None or k >= logits.shape[-1]:
        return logits
    values, ids = logits.topk(k)  # of tied tokens k in all, which a threshold would not keep to
    return torch.full_like(logits, float("-inf")).scatter(-1, ids, values)


def _nucleus(logits: Tensor, p: float | None) -> Tensor:
    """Logits (B, V) with all but the fewest likeliest that reach probability p at -inf."""
    if p is None or p >= 1:
        return logits
    ordered, order = logits.sort(descending=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # the likeliest token always stays
    return logits.masked_fill((before >= p).gather(-1, order.argsort(-1)), float("-inf"))
