"""Text generation: samples one token after another from the model's distribution."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Generator, Tensor

from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError
from fastgpt.kernels import batch_invariant, is_batch_invariant
from fastgpt.ops.kv_cache import Cache

OPTIONS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""Names of the options, in the order in which they are applied."""
COLDEST = 1e-6
"""Lowest temperature that logits are divided by; below it the likeliest token has it all."""


@torch.no_grad()
def generate(
    model: Any, tokens: Tensor, *, max_new_tokens: int, vocab_size: int | None = None,
    lengths: Tensor | None = None, stop_id: int | Sequence[int] | None = None,
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
    min_p: float | None = None, repetition_penalty: float = 1.0,
    generator: Generator | Sequence[Generator] | None = None, exact: bool = False,
) -> Tensor:  # fmt: skip
    """Continues each row of `tokens`; the model sees the last `context` tokens.

    While all tokens fit into the context, each is computed once, with a key/value cache. Beyond it
    the window slides and changes every token's position, which makes the cache invalid: each step
    then computes the whole window.

    Args:
        model: a `GPT` in evaluation mode.
        tokens: (B, T) int64 prompts, T >= 1.
        vocab_size: ids from this one on are never sampled (the tokenizer has no text for them);
            None: the model's vocabulary.
        lengths: (B,) int64 on the CPU, length of each prompt, 1 to T; tokens beyond it are ignored.
            None: T.
        stop_id: token that ends a row, or several; generation stops early when all rows have ended.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: number of likeliest tokens to sample from; None: all.
        top_p: sample from the smallest set of tokens that reaches this probability (Holtzman et al.
            2019); None: 1.
        min_p: sample from tokens with at least this share of the likeliest one's probability.
        repetition_penalty: factor by which tokens that the text has become less likely (Keskar et
            al. 2019); 1: none.
        generator: on the CPU, for all rows; or one for each, whose draws are then the same in any
            batch.
        exact: compute the same bits for a row alone, in a batch and when it is scored, at some cost
            (`kernels.batch_invariant`). With temperature 0 the tokens are then the same, too.

    Returns:
        Tensor: (B, T + max_new_tokens), each row's prompt and sampled tokens, padded with the
        first `stop_id` (0 if None).

    Raises:
        UserError: the tokens are no whole numbers (B, T), or an id is outside of the vocabulary, or
            an option of drawing is impossible.

    >>> model = fastgpt.GPT.from_config(num_layers=1, num_heads=2, dim=16, vocab_size=50).eval()
    >>> tokens = torch.tensor([[1, 2], [3, 4]])
    >>> fastgpt.generate(model, tokens, max_new_tokens=3, temperature=0.8, top_k=10).shape
    torch.Size([2, 5])
    """
    check_tokens(tokens, model.config)
    vocab_size = vocab_size or model.config.vocab_size
    assert vocab_size is not None
    B, T = tokens.shape
    ends = [] if stop_id is None else [stop_id] if isinstance(stop_id, int) else [*stop_id]
    filler = ends[0] if ends else 0
    prompt = torch.full((B,), T) if lengths is None else lengths
    over = torch.arange(T) >= prompt[:, None]
    options: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    check_options(max_new_tokens=max_new_tokens, **options)
    texts = tokens.cpu().where(~over, tokens[:, :1].cpu())  # no padding
    seen = torch.zeros(B, model.config.vocab_size, dtype=torch.bool).scatter(1, texts, True)
    tokens = tokens.masked_fill(over.to(tokens.device), filler)
    tokens = F.pad(tokens, (0, max_new_tokens), value=filler)
    rows, ended = torch.arange(B), torch.zeros(B, dtype=torch.bool)
    for step, logits in enumerate(following(model, tokens, prompt, T, exact=exact)):
        logits = logits[:, :vocab_size].float().cpu()
        drawn = draw(logits, seen[:, :vocab_size], generator, **options)
        seen[rows, drawn] = True
        drawn = drawn.masked_fill(ended, filler)
        tokens[rows, prompt + step] = drawn.to(tokens.device)
        ended |= torch.isin(drawn, torch.tensor(ends, dtype=torch.int64))
        if ended.all():
            break
    return tokens


@torch.no_grad()
def following(
    model: Any, tokens: Tensor, prompt: Tensor, longest: int, *, exact: bool = False
) -> Iterator[Tensor]:
    """Yields the logits (B, V) after each row's text, which the caller then extends by a token.

    Args:
        tokens: (B, `longest` + new tokens) int64; the caller writes row i from `prompt[i]` on.
        prompt: (B,) int64 on the CPU, length of each prompt.
        longest: length of the longest.
        exact: as in `generate`.
    """
    (B, size), T, context, device = tokens.shape, longest, model.config.context, tokens.device
    rows, prompt = torch.arange(B, device=device), prompt.to(device)
    cache = Cache(model.config, B, min(context, size), device) if context >= T else None
    for step in range(size - T):
        ends = prompt + step  # (B,), tokens in each row
        with batch_invariant(exact or is_batch_invariant()):  # not while the caller has the turn
            if cache is None or T + step > context:
                logits = _of_window(model, tokens[:, : T + step], ends)
            elif step == 0:
                logits = model(tokens[:, :T], cache=cache, last=prompt - 1)[:, -1]
                cache.lengths = prompt
            else:
                logits = model(tokens[rows, ends - 1][:, None], cache=cache)[:, -1]
        yield logits


def check_tokens(tokens: Tensor, config: ModelConfig) -> None:
    """Raises `UserError` unless tokens are ids (B, T), T >= 1, of the model's vocabulary."""
    if tokens.dim() != 2 or tokens.shape[1] < 1 or tokens.dtype not in (torch.int64, torch.int32):
        raise UserError(
            f"the tokens have the shape {tuple(tokens.shape)} and dtype {tokens.dtype}: expected"
            " (batch, length), int64"
        )
    assert config.vocab_size is not None
    known = not tokens.is_meta and tokens.numel()
    if known and not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
        raise UserError(
            f"the tokens reach from {int(tokens.min())} to {int(tokens.max())}: expected ids of the"
            f" vocabulary, 0 to {config.vocab_size - 1}"
        )


def _of_window(model: Any, tokens: Tensor, ends: Tensor) -> Tensor:
    """Returns the logits (B, V) after the first `ends` (B,) tokens of each row, without a cache."""
    context = model.config.context
    first = (ends - context).clamp(min=0)
    window = first[:, None] + torch.arange(min(context, tokens.shape[1]), device=tokens.device)
    seen = tokens.gather(1, window.clamp(max=tokens.shape[1] - 1))
    return model(seen, last=ends - first - 1)[:, -1]


# --- drawing --------------------------------------------------------------------------------------


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

    See `generate` for the options.

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
