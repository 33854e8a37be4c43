"""Text to token ids and back: bytes, characters, and GPT-2's byte-pair encoding.

A tokenizer is saved as a small `tokenizer.json` beside the data and the weights it belongs to.
Decoding shows an id that stands for nothing as U+FFFD: a sample must never end a training run.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tiktoken
import tiktoken.load

from fastgpt.errors import UserError, unknown_name
from fastgpt.shards import MAX_ID, write_atomically
from fastgpt.sources import data_dir

KINDS = ("bytes", "chars", "gpt2")
FILE_NAME = "tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

GPT2_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# How GPT-2 cuts text into words before merging bytes (openai/gpt-2, src/encoder.py).
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Tokenizer(Protocol):
    """What the rest of the code knows of a tokenizer."""

    kind: str
    """The name that `make_tokenizer` knows it by."""
    vocab_size: int
    """Ids run from 0 to `vocab_size - 1`."""
    eot_id: int | None
    """The id that ends a document; None if there is none."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`: (N,), uint16 where every id of the vocabulary fits, else uint32."""
        ...

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; never fails on an integer."""
        ...

    def save(self, path: Path) -> None:
        """Writes the JSON file `path`; if that is a folder, `tokenizer.json` in it."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8.

    Round trip: every text without lone surrogates, which UTF-8 cannot hold: they become `?`.
    """

    kind: str = "bytes"
    vocab_size: int = 256
    eot_id: int | None = None

    def encode(self, text: str) -> np.ndarray:
        """UTF-8 bytes of `text`: (N,) uint16."""
        return self.encode_bytes(text.encode(errors="replace"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Any bytes at all, text or not: (N,) uint16."""
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; what is not UTF-8, and ids over 255, show as U+FFFD."""
        values = _as_array(ids)
        # 0xFF occurs nowhere in UTF-8, so it always decodes to U+FFFD
        known = np.where((values >= 0) & (values < self.vocab_size), values, 0xFF)
        return known.astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, path: Path) -> None:
        """Writes `tokenizer.json`."""
        _save(path, {"kind": self.kind})


class CharTokenizer:
    """The distinct characters of one text, in code point order.

    Round trip: every text made of those characters.
    """

    kind: str = "chars"
    eot_id: int | None = None

    def __init__(self, chars: Iterable[str]) -> None:
        self.chars = tuple(sorted(set(chars)))
        self.vocab_size = len(self.chars)
        if not self.chars:
            raise UserError("a character tokenizer needs at least one character")
        self._points = np.array([ord(char) for char in self.chars], np.uint32)
        self._dtype = np.uint16 if self.vocab_size - 1 <= MAX_ID else np.uint32

    @classmethod
    def train(cls, text: str) -> "CharTokenizer":
        """The tokenizer whose vocabulary is the characters of `text`."""
        return cls(text)

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`: (N,) uint16, or uint32 if there are more than 65,536 characters.

        Raises:
            UserError: a character that is not in the vocabulary; names it and its offset.
        """
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = np.searchsorted(self._points, points).clip(max=self.vocab_size - 1)
        unknown = self._points[ids] != points
        if unknown.any():
            offset = int(np.argmax(unknown))
            char = text[offset]
            raise UserError(
                f"character {char!r} (U+{ord(char):04X}) at offset {offset:,} is not among the"
                f" {self.vocab_size} characters of the tokenizer"
            )
        return ids.astype(self._dtype)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; ids outside the vocabulary show as U+FFFD."""
        values = _as_array(ids)
        known = (values >= 0) & (values < self.vocab_size)
        points = np.where(known, self._points[np.where(known, values, 0)], ord(REPLACEMENT))
        return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def save(self, path: Path) -> None:
        """Writes `tokenizer.json`, with the vocabulary in it."""
        # one string per character: two lone surrogates in one string would be read back as one
        _save(path, {"kind": self.kind, "chars": list(self.chars)})


class GPT2Tokenizer:
    """GPT-2's 50,257 tokens, through `tiktoken`.

    The text `<|endoftext|>` is encoded as the ordinary text it is; only `eot_id` ends a document.
    Round trip: every text without lone surrogates.

    Args:
        tokens: the bytes of ids 0 to 50,255, which are also the order of the merges.
    """

    kind: str = "gpt2"
    vocab_size: int = 50_257
    eot_id: int | None = 50_256

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tuple(tokens)
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens)},
            special_tokens={"<|endoftext|>": len(self.tokens)},
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def published(cls) -> "GPT2Tokenizer":
        """From the two files that OpenAI published, which lie in `data_dir()`.

        Raises:
            UserError: `encoder.json` or `vocab.bpe` is missing, or is another file of that name.
        """
        for name in GPT2_SHA256:
            _check_gpt2_file(data_dir() / name)
        ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(data_dir() / "vocab.bpe"),
            encoder_json_file=str(data_dir() / "encoder.json"),
            vocab_bpe_hash=GPT2_SHA256["vocab.bpe"],
            encoder_json_hash=GPT2_SHA256["encoder.json"],
        )
        return cls(sorted(ranks, key=ranks.__getitem__))

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`: (N,) uint16."""
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; broken UTF-8, and ids outside the vocabulary, show as U+FFFD."""
        values = _as_array(ids).tolist()
        pieces = (
            self._encoding.decode_single_token_bytes(i) if 0 <= i < self.vocab_size else b"\xff"
            for i in values
        )
        return b"".join(pieces).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Writes `tokenizer.json`, 0.8 MB that need no other file to be read again."""
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        _save(path, {"kind": self.kind, "tokens": tokens})


def make_tokenizer(kind: str, text: str | None) -> Tokenizer:
    """A new tokenizer of a kind in `KINDS`; `chars` takes its vocabulary from `text`."""
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "gpt2":
        return GPT2Tokenizer.published()
    if kind != "chars":
        raise unknown_name("tokenizer", kind, KINDS)
    if text is None:
        raise UserError("the chars tokenizer needs a text to take its characters from")
    return CharTokenizer.train(text)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads what `save` wrote; `path` is the file, or the folder that holds `tokenizer.json`.

    Raises:
        UserError: no such file, or not one that `save` wrote.
    """
    path = _file(path)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        kind = saved["kind"]
        if kind == "chars":
            return CharTokenizer(saved["chars"])
        if kind == "gpt2":
            tokens = [base64.b64decode(token) for token in saved["tokens"]]
            if len(set(tokens)) != GPT2Tokenizer.vocab_size - 1:
                raise ValueError(f"{len(set(tokens))} tokens")
            return GPT2Tokenizer(tokens)
        return make_tokenizer(kind, None)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such tokenizer file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a tokenizer file that fastgpt wrote ({error!r})") from error


def _as_array(ids: Iterable[int] | np.ndarray) -> np.ndarray:
    return np.asarray(ids if hasattr(ids, "__array__") else list(ids), np.int64).reshape(-1)


def _file(path: Path) -> Path:
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)


def _save(path: Path, content: dict[str, Any]) -> None:
    write_atomically(_file(path), (json.dumps(content) + "\n").encode())


def _check_gpt2_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(
            f"the gpt2 tokenizer needs {path}, as OpenAI published it: put encoder.json and"
            " vocab.bpe there, or set FASTGPT_DATA to the folder that has them"
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GPT2_SHA256[path.name]:
        expected = GPT2_SHA256[path.name]
        raise UserError(f"{path} is not GPT-2's: its sha256 is {found}, expected {expected}")
