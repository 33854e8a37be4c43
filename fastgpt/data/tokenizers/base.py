"""Interface of tokenizers, and helper functions."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from fastgpt.files import write_atomically

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Converter of text to token ids and back.

    Decoding shows an unknown id as U+FFFD, because a sample must never end a training run.
    """

    kind: str
    """Kind of tokenizer, as in `make_tokenizer`; for a Hugging Face `tokenizer.json`, the name of
    its model in lower case."""
    vocab_size: int
    """Number of ids, which are 0 to `vocab_size - 1`."""
    eot_id: int | None = None
    """Id of the end-of-text token, which begins each document; None if there is none."""

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,): uint16 if every id of the vocabulary fits, else uint32."""
        ...

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; never fails on an integer."""
        ...

    def to_json(self) -> str:
        """Returns the JSON from which `load_tokenizer` restores this tokenizer."""
        ...

    def save(self, path: Path) -> None:
        """Writes the tokenizer to `path`, or if that is a folder to `tokenizer.json` in it."""
        write_atomically(tokenizer_file(path), self.to_json().encode())


def tokenizer_file(path: Path) -> Path:
    """Returns `path`, or if that is a folder `tokenizer.json` in it."""
    return Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)


def id_array(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    """Converts ids to an array (N,) int64."""
    return np.asarray(ids if hasattr(ids, "__array__") else list(ids), np.int64).reshape(-1)


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates by U+FFFD and joins pairs, so that UTF-8 can encode the text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
