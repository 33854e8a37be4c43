"""Evaluation of a model: its loss on held-out text, and text sampled from it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastgpt.data.loader import IGNORED
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.distributed import Stopped, StopSignal, World
from fastgpt.errors import UserError
from fastgpt.generate import generate
from fastgpt.model import GPT


@torch.no_grad()
def mean_loss(
    model: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    world: World,
    device: str,
    autocast: AbstractContextManager,
    stop: StopSignal | None = None,
) -> tuple[float, int]:
    """Mean loss in nats over the targets of all ranks' batches, and the number of targets.

    Args:
        model: (tokens, targets) -> mean loss, in evaluation mode.
        batches: this rank's; each has the shape of training's, so that nothing recompiles.
        world: the ranks.
        device: of the model.
        autocast: entered around each forward.
        stop: looked at before each batch.

    Raises:
        Stopped: by all ranks, if one was asked to stop before its batches were through.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for x, y in batches:
        if stop is not None and stop.received:
            totals[2] = 1
            break
        count = int((y != IGNORED).sum())
        with autocast:
            loss = model(x.to(device), y.to(device))
        totals[:2] += torch.stack((loss.double() * count, torch.tensor(count, device=device)))
    total, count, stopped = world.sum(totals).tolist()
    if stopped:
        raise Stopped
    return total / count, int(count)


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> Tensor:
    """Encodes a prompt as token ids, (T,) int64; an empty one begins a document.

    Raises:
        UserError: the prompt is empty, or has a character that the tokenizer does not know.
    """
    ids = tokenizer.encode(prompt)
    if not len(ids) and tokenizer.eot_id is not None:
        ids = np.array([tokenizer.eot_id])  # what a document begins with
    if not len(ids):
        raise UserError("the prompt is empty: expected at least one token to continue")
    return torch.from_numpy(ids.astype(np.int64))


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    top_k: int | None = None,
    top_p: float | None = None,
    count: int = 1,
    device: str = "cpu",
) -> list[str]:
    """Samples `count` continuations of each prompt, prompt included, all of them in one batch.

    A text ends before the end-of-text token that follows its prompt, if one was sampled.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: (T,) int64 each, of any lengths from 1 on.
        max_new_tokens: in each.
        temperature: divides the logits; 0 takes the likeliest token.
        seed: random seed for sampling.
        top_k: sample from this many likeliest tokens only.
        top_p: sample from the likeliest tokens that together reach this probability only.
        count: texts of each prompt; the first prompt's come first.
        device: of the model.
    """
    prompts = [prompt for prompt in prompts for _ in range(count)]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = generate(
        model,
        pad_sequence(prompts, batch_first=True).to(device),
        lengths=lengths,
        max_new_tokens=max_new_tokens,
        vocab_size=tokenizer.vocab_size,
        stop_id=tokenizer.eot_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(seed),
    )
    texts = []
    for row, length in zip(tokens.cpu(), lengths.tolist()):
        end = length + max_new_tokens
        if tokenizer.eot_id is not None:
            drawn = row[length:end] == tokenizer.eot_id
            end = length + int(drawn.int().argmax()) if drawn.any() else end
        texts.append(tokenizer.decode(row[:end].numpy()))
    return texts
