"""Loss and bits per byte of a text or of a prepared dataset."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from fastgpt.data.corpus import has_shards, open_shards
from fastgpt.data.loader import eval_batches
from fastgpt.data.reading import read_chunks
from fastgpt.data.shards import Tokens
from fastgpt.data.sources import find_source
from fastgpt.data.tokenizers import Tokenizer, same_tokenizer
from fastgpt.errors import UserError, counted
from fastgpt.evaluate.validation import mean_loss, perplexity
from fastgpt.model.gpt import GPT
from fastgpt.parallel.distributed import World


def read_text(path: str, tokenizer: Tokenizer) -> tuple[np.ndarray | Tokens, float | None]:
    """Reads the held-out tokens of a prepared dataset, or all of a text, a file or a folder.

    Returns:
        Token ids (N,), with the end-of-text token, if there is one, before each document; and the
        mean bytes of UTF-8 per token, None if unknown.

    Raises:
        UserError: it cannot be read or has fewer than 2 tokens, or the dataset was made with
            another tokenizer.
    """
    if has_shards(folder := Path(path).expanduser()):
        corpus = open_shards(folder, tokenizer="auto")
        if not same_tokenizer(corpus.tokenizer, tokenizer):
            raise UserError(
                f"{path} was prepared with another {corpus.tokenizer.kind} tokenizer than the"
                f" model's ({tokenizer.kind}): pass the text itself"
            )
        return corpus.val, corpus.val_bytes_per_token
    parts, size = [], 0
    for chunk in read_chunks(find_source(path)):
        assert isinstance(chunk.text, str)
        if chunk.begins and tokenizer.eot_id is not None:
            parts.append(np.array([tokenizer.eot_id]))
        parts.append(tokenizer.encode(chunk.text))
        size += len(chunk.text.encode())
    count = sum(map(len, parts))
    if count < 2:
        raise UserError(f"{path} has {counted(count, 'token')}: expected at least 2")
    return np.concatenate(parts), size / count


def score_text(
    model: GPT, tokens: np.ndarray | Tokens, bytes_per_token: float | None, *,
    batch: int, device: str, autocast: AbstractContextManager, report: Callable[[str], None],
) -> tuple[dict[str, float], int]:  # fmt: skip
    """Computes loss, perplexity and, where the size is known, bits per byte; counts the targets.

    The windows are those of the harness: each of the tokens (N,) but the first is scored once, and
    the last window reaches back to fill the context; `batch` of them are computed at once.
    """
    context = min(model.config.context, max(1, len(tokens) - 1))
    batch = min(batch, -(-len(tokens) // context))
    batches = eval_batches(
        tokens, context=context, micro_batch=batch, rank=0, world_size=1, max_tokens=0
    )
    loss, count = mean_loss(
        model, batches, world=World(), device=device, autocast=autocast, report=report
    )
    found = {"loss": loss, "perplexity": perplexity(loss)}
    if bytes_per_token is not None:
        found["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return found, count
