"""Text to token ids and back: one interface, bytes, characters, and where the others come from.

A tokenizer is saved as a `tokenizer.json` beside the data and the weights it belongs to. Ours have
a "kind" in it; any other is Hugging Face's, which has a "model".
Decoding shows an id that stands for nothing as U+FFFD: a sample must never end a training run.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from fastgpt.data.shards import token_dtype
from fastgpt.errors import UserError, unknown_name
from fastgpt.storage import write_atomically

KINDS = ("bytes", "chars", "gpt2", "bpe", "wordpiece")
FILE_NAME = "tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

SIZED = ("bpe", "wordpiece")
"""Kinds that are trained to a vocabulary size."""
DEFAULT_VOCAB_SIZE = 32_768
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 257, 2**20
"""256 bytes and the end of text; four times the largest in use."""


class Tokenizer(Protocol):
    """What the rest of the code knows of a tokenizer."""

    kind: str
    """What `make_tokenizer` calls it; of a foreign `tokenizer.json`, its model in lower case."""
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
        """All that `load_tokenizer` needs to have this tokenizer again."""
        ...

    def save(self, path: Path) -> None:
        """Writes the JSON file `path`; if that is a folder, `tokenizer.json` in it."""
        write_atomically(_file(path), self.to_json().encode())


class ByteTokenizer(Tokenizer):
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
        values = id_array(ids)
        # 0xFF occurs nowhere in UTF-8, so it always decodes to U+FFFD
        known = np.where((values >= 0) & (values < self.vocab_size), values, 0xFF)
        return known.astype(np.uint8).tobytes().decode(errors="replace")

    def to_json(self) -> str:
        """Its kind is all there is."""
        return json.dumps({"kind": self.kind})


class CharTokenizer(Tokenizer):
    """The distinct characters of a text, in code point order.

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

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharTokenizer":
        """The tokenizer whose vocabulary is the characters of `texts`, taken one by one."""
        return cls(char for text in texts for char in set(text))

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
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of `ids`; ids outside the vocabulary show as U+FFFD."""
        values = id_array(ids)
        known = (values >= 0) & (values < self.vocab_size)
        points = np.where(known, self._points[np.where(known, values, 0)], ord(REPLACEMENT))
        return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def to_json(self) -> str:
        """Its kind and the vocabulary."""
        # one string per character: two lone surrogates in one string would be read back as one
        return json.dumps({"kind": self.kind, "chars": list(self.chars)})


def check_kind(kind: str, vocab_size: int | None = None) -> None:
    """Raises the `UserError` that `make_tokenizer` would, as far as it costs nothing to find."""
    path = "the path of a tokenizer.json or of a folder with one"
    if kind not in KINDS and not (kind and _file(Path(kind).expanduser()).is_file()):
        raise unknown_name("tokenizer", kind, KINDS, also=path)
    if kind in SIZED:
        _json_module(f"the {kind} tokenizer")
    if vocab_size is None:
        return
    if kind not in SIZED:
        raise UserError(
            f"vocab_size {vocab_size} for the tokenizer {kind}: expected bpe or wordpiece, the"
            " others bring their own"
        )
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(
            f"vocab_size {vocab_size}: expected {MIN_VOCAB_SIZE:,} to {MAX_VOCAB_SIZE:,}"
        )


def make_tokenizer(
    kind: str, texts: Callable[[], Iterable[str]] | None, *, vocab_size: int | None = None
) -> Tokenizer:
    """A new tokenizer.

    Args:
        kind: one of `KINDS`, else the path of a `tokenizer.json` or of a folder with one.
        texts: gives the corpus piece by piece, for chars, bpe and wordpiece to learn from; it may
            be called twice.
        vocab_size: for bpe and wordpiece, 32,768 by default, which uint16 holds and 64 divides.
            A corpus with too little in it gives fewer tokens.
    Raises:
        UserError: no such kind or file, a size that cannot be, nothing to learn from, no
            `tokenizers` package where it is needed, or gpt2's files are nowhere to be had.
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
        raise UserError(f"the {kind} tokenizer needs a text to learn from")
    if kind == "chars":
        return CharTokenizer.train(texts())
    module = _json_module(kind)
    train = module.train_bpe if kind == "bpe" else module.train_wordpiece
    return train(texts, vocab_size or DEFAULT_VOCAB_SIZE)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads what `save` wrote, or any other program's `tokenizer.json`.

    Args:
        path: the file, or the folder that holds `tokenizer.json`.
    Raises:
        UserError: no such file, or not one that can be read.
    """
    path = _file(path)
    try:
        content = path.read_text(encoding="utf-8")
        saved = json.loads(content)
        if "kind" not in saved and "model" in saved:
            return _json_module("a tokenizer.json").JsonTokenizer(content)
        return _restore(saved)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such tokenizer file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a tokenizer file ({error!r})") from error


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether `save` would write the same content for both."""
    return json.loads(a.to_json()) == json.loads(b.to_json())


def _restore(saved: dict[str, Any]) -> Tokenizer:
    """One of ours, from the content of its file."""
    kind = saved["kind"]
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "chars":
        return CharTokenizer(saved["chars"])
    if kind == "gpt2":
        from fastgpt.data.tokenizers.gpt2 import GPT2Tokenizer

        return GPT2Tokenizer.from_base64(saved["tokens"])
    raise unknown_name("tokenizer", kind, ("bytes", "chars", "gpt2"))


def _json_module(what: str) -> ModuleType:
    """`fastgpt.data.tokenizers.huggingface`, which needs a package that training alone does not."""
    try:
        from fastgpt.data.tokenizers import huggingface
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        raise UserError(
            f"{what} needs the tokenizers package, which the extra `data` brings:"
            " make setup EXTRAS=dev,data"
        ) from error
    return huggingface


# --- shared by the tokenizers ---------------------------------------------------------------------


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


def _file(path: Path) -> Path:
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
