"""Sampling: one token after another from the model's own distribution."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.cache import Cache
from fastgpt.model import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    vocab_size: int,
    lengths: Tensor | None = None,
    stop_id: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continues each row of `tokens`; the model sees the last `context` tokens.

    As long as all of them fit into the context, each is computed once and its keys and values are
    kept. Beyond it the window moves, and with it every token's position: nothing that was kept
    would be right, so each step computes the whole window.

    Args:
        model: in evaluation mode.
        tokens: (B, T) int64 prompts, T >= 1.
        max_new_tokens: how many to add.
        vocab_size: ids from here on are never drawn (the tokenizer has no text for them).
        lengths: (B,) int64 on the CPU: how much of each row is prompt, 1 to T; what is beyond is
            ignored. T by default.
        stop_id: a row that has drawn it is over; when all are, no more is computed.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of tokens whose probability reaches p only (Holtzman et
            al. 2019).
        generator: of random numbers, on the CPU.

    Returns:
        Tensor: (B, T + max_new_tokens): of each row its prompt, what was drawn, and up to the end
        `stop_id` (0 where there is none).
    """
    B, T = tokens.shape
    context, device = model.config.context, tokens.device
    filler = 0 if stop_id is None else stop_id
    prompt = torch.full((B,), T) if lengths is None else lengths
    over = torch.arange(T) >= prompt[:, None]
    tokens = F.pad(tokens.masked_fill(over.to(device), filler), (0, max_new_tokens), value=filler)
    rows, ended = torch.arange(B, device=device), torch.zeros(B, dtype=torch.bool)
    prompt = prompt.to(device)
    cache = None
    if context >= T:
        cache = Cache(model.config, B, min(context, T + max_new_tokens), device)
    for step in range(max_new_tokens):
        ends = prompt + step  # (B,), tokens in each row
        if cache is None or T + step > context:
            logits = _of_window(model, tokens[:, : T + step], ends)
        elif step == 0:
            logits = model(tokens[:, :T], cache=cache)[rows, prompt - 1]
            cache.lengths = prompt
        else:
            logits = model(tokens[rows, ends - 1][:, None], cache=cache)[:, -1]
        logits = logits[:, :vocab_size].float().cpu()
        if temperature == 0:
            drawn = logits.argmax(-1)
        else:
            kept = _nucleus(_top(logits / temperature, top_k), top_p)
            drawn = torch.multinomial(kept.softmax(-1), 1, generator=generator)[:, 0]
        drawn = drawn.masked_fill(ended, filler)
        tokens[rows, ends] = drawn.to(device)
        if stop_id is not None:
            ended |= drawn == stop_id
            if ended.all():
                break
    return tokens


def _of_window(model: GPT, tokens: Tensor, ends: Tensor) -> Tensor:
    """Logits (B, V) of what follows the first ends (B,) of `tokens`, from the context alone."""
    context = model.config.context
    first = (ends - context).clamp(min=0)
    window = first[:, None] + torch.arange(min(context, tokens.shape[1]), device=tokens.device)
    seen = tokens.gather(1, window.clamp(max=tokens.shape[1] - 1))
    return model(seen)[torch.arange(len(seen), device=tokens.device), ends - first - 1]


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
    before = probability.cumsum(-1) - probability
    rest = before >= p
    rest[:, 0] = False  # the likeliest token always stays: in fp32 p may be 0
    return logits.masked_fill(rest.gather(-1, order.argsort(-1)), float("-inf"))
