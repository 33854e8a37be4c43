"""Interface of tokenizers, and those without a file of their own, for bytes and characters."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from fastgpt.data.shards import token_dtype
from fastgpt.errors import UserError, counted
from fastgpt.files import write_atomically
from fastgpt.terminal import REPLACEMENT

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
    begin_ids: tuple[int, ...] = ()
    """Ids with which the tokenizer's own file begins a text."""
    stop_ids: frozenset[int] = frozenset()
    """Further ids that end an answer of the model."""

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,): uint16 if every id of the vocabulary fits, else uint32."""
        ...

    def encode_marked(self, text: str) -> np.ndarray:
        """Encodes `text` as `encode` does, but special tokens in it as such."""
        return self.encode(text)

    def end_ids(self) -> list[int]:
        """Returns the ids that end what a model writes."""
        return sorted(x for x in {self.eot_id, *self.stop_ids} if x is not None)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; never fails on an integer."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""
        return self.decode([id]).encode(errors="surrogatepass")

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


class ByteTokenizer(Tokenizer):
    """Tokenizer whose tokens are the 256 bytes of UTF-8.

    Round trip: every text without lone surrogates, which UTF-8 cannot hold: they become `?`.
    """

    kind = "bytes"
    vocab_size = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encodes `text` as its UTF-8 bytes, and bytes as they are: (N,) uint16."""
        data = text.encode(errors="replace") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; broken UTF-8 and ids over 255 become U+FFFD."""
        values = id_array(ids)
        # 0xFF occurs nowhere in UTF-8, so it always decodes to U+FFFD
        known = np.where((values >= 0) & (values < self.vocab_size), values, 0xFF)
        return known.astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Returns the byte of a token."""
        return bytes([id])

    def to_json(self) -> str:
        """Returns the kind as JSON; bytes need no vocabulary."""
        return json.dumps({"kind": self.kind})


class CharTokenizer(Tokenizer):
    """Tokenizer whose tokens are the distinct characters of a text, in code point order.

    Round trip: every text made of those characters.
    """

    kind = "chars"

    def __init__(self, chars: Iterable[str]) -> None:
        self.chars = tuple(sorted(set(chars)))
        self.vocab_size = len(self.chars)
        if not self.chars:
            raise UserError("a character tokenizer needs at least one character")
        self._points = np.array([ord(char) for char in self.chars], np.uint32)

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharTokenizer":
        """Makes a tokenizer of the characters of `texts`."""
        return cls(char for text in texts for char in set(text))

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,): uint16, or uint32 for more than 65,536 characters.

        Raises:
            UserError: a character is not in the vocabulary; the message names it and its offset.
        """
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = np.searchsorted(self._points, points).clip(max=self.vocab_size - 1)
        unknown = self._points[ids] != points
        if unknown.any():
            offset = int(np.argmax(unknown))
            char = text[offset]
            raise UserError(
                f"character {char!r} (U+{ord(char):04X}) at offset {offset:,} is not among the"
                f" {counted(self.vocab_size, 'character')} of the tokenizer"
            )
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; ids outside the vocabulary become U+FFFD."""
        values = id_array(ids)
        known = (values >= 0) & (values < self.vocab_size)
        points = np.where(known, self._points[np.where(known, values, 0)], ord(REPLACEMENT))
        return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def to_json(self) -> str:
        """Returns the kind and the vocabulary as JSON."""
        # one string per character: two lone surrogates in one string would be read back as one
        return json.dumps({"kind": self.kind, "chars": list(self.chars)})


class IdTokenizer(Tokenizer):
    """Stand-in for an unknown tokenizer: a text is its ids as numbers, "17 4 256"."""

    kind = "ids"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise UserError(f"vocab_size is {vocab_size}: expected 1 or more")
        self.vocab_size = vocab_size

    def encode(self, text: str) -> np.ndarray:
        """Reads numbers as ids (N,): uint16 if every id of the vocabulary fits, else uint32.

        Raises:
            UserError: a word is no number, or no id of the vocabulary.
        """
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise UserError(f"{word!r} is no id: expected 0 to {self.vocab_size - 1}")
        return np.array(text.split(), token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Writes ids as numbers."""
        return " ".join(map(str, id_array(ids).tolist()))

    def to_json(self) -> str:
        """Returns the kind and the number of ids as JSON."""
        return json.dumps({"kind": self.kind, "vocab_size": self.vocab_size})
