"""Interface of tokenizers, and functions that several of them use."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from fastgpt.data.shards import token_dtype
from fastgpt.storage import write_atomically

TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Converter of text to token ids and back.

    Decoding shows an id that stands for nothing as U+FFFD: a sample must never end a training run.
    """

    kind: str
    """Name in `make_tokenizer`; of a foreign `tokenizer.json`, its model in lower case."""
    vocab_size: int
    """Ids run from 0 to `vocab_size - 1`."""
    eot_id: int | None
    """The id that ends a document; None if there is none."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`: (N,), uint16 where every id of the vocabulary fits, else uint32."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Ids of several documents, the end-of-text token before each; there must be one."""
        eot = np.array([self.eot_id], token_dtype(self.vocab_size))
        return np.concatenate([ids for text in texts for ids in (eot, self.encode(text))])

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; never fails on an integer."""
        ...

    def to_json(self) -> str:
        """The JSON-able state from which `load_tokenizer` makes this tokenizer again."""
        ...

    def save(self, path: Path) -> None:
        """Writes the JSON file `path`; if that is a folder, `tokenizer.json` in it."""
        write_atomically(tokenizer_file(path), self.to_json().encode())


def tokenizer_file(path: Path) -> Path:
    """The file that `path` means: itself, or `tokenizer.json` in the folder `path`."""
    return Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)


def id_array(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    """`ids`, whatever holds them, as (N,) int64."""
    return np.asarray(ids if hasattr(ids, "__array__") else list(ids), np.int64).reshape(-1)


def replace_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, and pairs of them joined: fit for UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
