"""Text sampled from a model: prompts encoded, continued in one batch, and decoded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastgpt.data.tokenizers import Tokenizer
from fastgpt.errors import UserError
from fastgpt.model.generation import generate
from fastgpt.model.gpt import GPT


def encode_prompt(prompt: str, tokenizer: Tokenizer, name: str = "the prompt") -> Tensor:
    """Encodes a prompt as token ids, (T,) int64, with those that begin a text of the tokenizer.

    Where there are none, an empty prompt becomes the end-of-text token.

    Raises:
        UserError: the prompt is empty and there is no such token, or it has an unknown character;
            the message calls it `name`.

    >>> model, tokenizer = fastgpt.load("runs/mine")
    >>> fastgpt.encode_prompt("To be", tokenizer).shape
    torch.Size([5])
    """
    try:
        ids = np.append(np.array(tokenizer.begin_ids, np.int64), tokenizer.encode(prompt))
    except UserError as error:
        raise UserError(f"{name} is {prompt!r}: {error}") from error
    if not len(ids) and tokenizer.eot_id is not None:
        ids = np.array([tokenizer.eot_id])  # each document begins with it
    if not len(ids):
        raise UserError(f"{name} is empty: expected some text")
    return torch.from_numpy(ids.astype(np.int64))


def stop_strings(stop: str | Sequence[str]) -> list[str]:
    """Returns one stop string, or several, as a list without empty ones."""
    return [*filter(None, [stop] if isinstance(stop, str) else stop)]


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    seed: int,
    count: int = 1,
    stop: str | Sequence[str] = (),
    device: str = "cpu",
    **options: Any,
) -> list[str]:
    """Samples `count` continuations of each prompt, prompt included, all of them in one batch.

    A text ends before the first token that ends it, or `stop` string, that was sampled.

    Args:
        model: in evaluation mode.
        prompts: each (T,) int64, T >= 1; lengths may differ.
        count: number of texts per prompt; the first prompt's texts come first.
        options: others of `fastgpt.generate`: temperature, top_k, ....

    >>> model, tokenizer = fastgpt.load("runs/mine")
    >>> prompts = [fastgpt.encode_prompt("To be", tokenizer)]
    >>> options = {"max_new_tokens": 20, "temperature": 0.8, "seed": 1}
    >>> [text] = fastgpt.sample_text(model, tokenizer, prompts, **options)
    >>> text.startswith("To be")
    True
    """
    prompts = [prompt for prompt in prompts for _ in range(count)]
    ends = tokenizer.end_ids()
    tokens = generate(
        model,
        pad_sequence(prompts, batch_first=True).to(device),
        lengths=torch.tensor([len(prompt) for prompt in prompts]),
        max_new_tokens=max_new_tokens,
        vocab_size=tokenizer.vocab_size,
        stop_id=ends,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    texts = []
    for prompt, row in zip(prompts, tokens.tolist()):
        begin, end = len(prompt), len(prompt) + max_new_tokens
        end = next((i for i in range(begin, end) if row[i] in ends), end)
        text, begin = tokenizer.decode(row[:end]), len(tokenizer.decode(row[:begin]))
        found = (text.find(each, begin) for each in stop_strings(stop))
        texts.append(text[: min((i for i in found if i >= 0), default=None)])
    return texts
