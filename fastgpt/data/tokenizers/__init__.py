"""Tokenizers, by name and by file.

A tokenizer is saved as a `tokenizer.json` beside the data and the weights it belongs to. Ours have
a "kind" in it; any other is Hugging Face's, which has a "model". `gpt2` and `huggingface` are
imported on demand, because their packages take time to import.
"""

import base64
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from fastgpt.data.tokenizers.plain import (
    TOKENIZER_FILE,
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    Tokenizer,
    tokenizer_file,
)
from fastgpt.errors import UserError, brief, unknown_name
from fastgpt.files import parse_json

__all__ = [
    "TOKENIZER_FILE", "ByteTokenizer", "CharTokenizer", "IdTokenizer", "Tokenizer",
    "check_kind", "load_tokenizer", "make_tokenizer", "same_tokenizer",
]  # fmt: skip

KINDS = ("bytes", "chars", "gpt2", "bpe", "wordpiece")
SIZED = ("bpe", "wordpiece")
"""Kinds that are trained to a vocabulary size."""
DEFAULT_VOCAB_SIZE = 32_768
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 257, 2**20
"""Limits of a trained vocabulary: 256 bytes and the end of text; four times the largest in use."""


def check_kind(kind: str, vocab_size: int | None = None) -> None:
    """Raises the `UserError` of `make_tokenizer` for an unknown kind or a wrong size, cheaply."""
    if kind not in KINDS and not (kind and tokenizer_file(Path(kind).expanduser()).is_file()):
        path = "the path of a tokenizer.json or of a folder with one"
        raise unknown_name("tokenizer", kind, KINDS, also=path)
    if vocab_size is None:
        return
    if kind not in SIZED:
        raise UserError(
            f"--vocab-size is {vocab_size}: the {kind} tokenizer has its own vocabulary, expected"
            " bpe or wordpiece"
        )
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size is {vocab_size}: expected {MIN_VOCAB_SIZE:,} to {MAX_VOCAB_SIZE:,}"
        )


def make_tokenizer(
    kind: str, texts: Callable[[], Iterable[str]] | None, *, vocab_size: int | None = None
) -> Tokenizer:
    """Makes a tokenizer by kind or path, and trains it if necessary.

    Args:
        kind: one of `KINDS`, else the path of a `tokenizer.json` or of a folder with one.
        texts: returns the corpus piece by piece, to train chars, bpe and wordpiece on; it may be
            called twice.
        vocab_size: for bpe and wordpiece, 32,768 by default, which uint16 holds and 64 divides.
            A small corpus gives fewer tokens.
    Raises:
        UserError: unknown kind or file, impossible size, no text to train on, or GPT-2's files
            cannot be found or downloaded.
    """
    check_kind(kind, vocab_size)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "gpt2":
        from fastgpt.data.tokenizers.gpt2 import GPT2Tokenizer

        return GPT2Tokenizer.published()
    if kind not in KINDS:
        return load_tokenizer(Path(kind).expanduser())
    if texts is None:
        raise UserError(f"the {kind} tokenizer needs a text to train on")
    if kind == "chars":
        return CharTokenizer.train(texts())
    from fastgpt.data.tokenizers.huggingface import train_bpe, train_wordpiece

    train = train_bpe if kind == "bpe" else train_wordpiece
    return train(texts, vocab_size or DEFAULT_VOCAB_SIZE)


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer that `save` wrote, or another program's `tokenizer.json`.

    Args:
        path: the file, or the folder that holds `tokenizer.json`.
    Raises:
        UserError: the file is missing, or is not a tokenizer.
    """
    path = tokenizer_file(path)
    try:
        content = path.read_text(encoding="utf-8")
        saved = parse_json(content)
        if "kind" not in saved and "model" in saved:
            from fastgpt.data.tokenizers.huggingface import JsonTokenizer

            return JsonTokenizer(content)
        kind = saved["kind"]
        if kind == "bytes":
            return ByteTokenizer()
        if kind == "chars":
            return CharTokenizer(saved["chars"])
        if kind == "ids":
            return IdTokenizer(int(saved["vocab_size"]))
        if kind == "gpt2":
            from fastgpt.data.tokenizers.gpt2 import GPT2Tokenizer

            return GPT2Tokenizer([base64.b64decode(token) for token in saved["tokens"]])
        raise unknown_name("tokenizer", str(kind), ("bytes", "chars", "gpt2", "ids"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such tokenizer file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: not a tokenizer file ({brief(error)})") from error


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> bool:
    """Compares two tokenizers by what `save` would write.

    One of ours and one of Hugging Face are the same if each id stands for the same text.
    """
    if a.vocab_size != b.vocab_size:
        return False
    saved = [json.loads(x.to_json()) for x in (a, b)]
    if ("model" in saved[0]) == ("model" in saved[1]):
        return saved[0] == saved[1]
    # each id, and after it the last one, which keeps texts and incomplete characters apart
    ids = [id for first in range(a.vocab_size) for id in (first, a.vocab_size - 1)]
    return a.decode(ids) == b.decode(ids)
