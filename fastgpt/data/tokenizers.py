"""Tokenizers, by name and by file.

A tokenizer is saved beside the data and the weights it belongs to, as a `tokenizer.json` in Hugging
Face's format, which AutoTokenizer and the package `tokenizers` read. That package and `tiktoken`
are imported on demand, because they take time to import.
"""

import base64
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastgpt.data.download import published_file
from fastgpt.data.shards import token_dtype
from fastgpt.errors import UserError, brief, counted, reason, unknown_name
from fastgpt.files import parse_json, write_atomically
from fastgpt.terminal import REPLACEMENT

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
KINDS = ("bytes", "chars", "gpt2", "bpe", "wordpiece")
SIZED = ("bpe", "wordpiece")
"""Kinds that are trained to a vocabulary size."""
DEFAULT_VOCAB_SIZE = 32_768
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 257, 2**20
"""Limits of a trained vocabulary: 256 bytes and the end of text; four times the largest in use."""

_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PLAIN)
BYTES = {chr(x): x for x in _PLAIN} | {chr(256 + i): x for i, x in enumerate(_OTHERS)}
"""Byte for which each letter stands in byte-level BPE, in the order of GPT-2's ids."""
LETTERS = {byte: letter for letter, byte in sorted(BYTES.items(), key=lambda item: item[1])}

EOT = "<|endoftext|>"
EOT_TOKENS = (
    EOT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "[SEP]",
)  # fmt: skip
"""Usual names of the token that ends a text; the first that a vocabulary has is its `eot_id`."""

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/models/124M/vocab.bpe"
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_TOKENS_SHA256 = "6c3a12d345e638764f3f646a81f16ab08b9a648229cddc89fb341b4bdad3b7ea"
"""Hash of the tokens in a file of version 0.2, one a line."""


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
) -> "Tokenizer":
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
        return GPT2Tokenizer(json.dumps(_gpt2_file(_published_merges())))
    if kind not in KINDS:
        return load_tokenizer(Path(kind).expanduser())
    if texts is None:
        raise UserError(f"the {kind} tokenizer needs a text to train on")
    if kind == "chars":
        return CharTokenizer(char for text in texts() for char in set(text))
    train = train_bpe if kind == "bpe" else train_wordpiece
    return train(texts, vocab_size or DEFAULT_VOCAB_SIZE)


def load_tokenizer(path: Path) -> "Tokenizer":
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
        return _of_0_2(saved) if "kind" in saved else _of_file(saved, content)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such tokenizer file") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path}: not a tokenizer file ({brief(error)})") from error


def tokenizer_file(path: Path) -> Path:
    """Returns `path`, or if that is a folder `tokenizer.json` in it."""
    return Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)


def same_tokenizer(a: "Tokenizer", b: "Tokenizer") -> bool:
    """Compares two tokenizers by what `save` would write.

    Bytes, characters or GPT-2's, and another, are the same if each id stands for the same text.
    """
    if a.vocab_size != b.vocab_size:
        return False
    if json.loads(a.to_json()) == json.loads(b.to_json()):
        return True
    # each id, and after it the last one, which keeps texts and incomplete characters apart
    ids = [id for first in range(a.vocab_size) for id in (first, a.vocab_size - 1)]
    return bool({a.kind, b.kind} & {"bytes", "chars", "gpt2"}) and a.decode(ids) == b.decode(ids)


class Tokenizer:
    """Converter of text to token ids and back, which a Hugging Face `tokenizer.json` describes.

    Special tokens in a text are encoded as ordinary text, none are added, and nothing is truncated
    or padded, whatever the file asks for. Round trip: as far as the file's own steps allow.

    Args:
        content: the text of the file, which `to_json` and `save` return unchanged.

    Raises:
        UserError: the `tokenizers` package cannot read it, or the vocabulary is empty.
    """

    kind = ""
    """Kind as in `make_tokenizer`; for another file the name of its model in lower case."""
    vocab_size: int
    """Number of ids, which are 0 to `vocab_size - 1`."""
    eot_id: int | None = None
    """Id of the end-of-text token, which begins each document; None if there is none."""
    begin_ids: tuple[int, ...] = ()
    """Ids with which the tokenizer's own file begins a text."""
    stop_ids: frozenset[int] = frozenset()
    """Further ids that end an answer of the model."""

    def __init__(self, content: str) -> None:
        import tokenizers

        self._content = content
        with refusing("not a tokenizer that the tokenizers package can read"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("the vocabulary of the tokenizer is empty")
        self._known = {*vocabulary.values()}
        self.kind = self.kind or type(self._tokenizer.model).__name__.lower()
        self.vocab_size = max(self._known) + 1  # ids may have gaps
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        """Ids of special tokens, which `encode` takes for text."""
        self.eot_id = next((vocabulary[name] for name in EOT_TOKENS if name in vocabulary), None)
        self.begin_ids = self._begin_ids()

    def _begin_ids(self) -> tuple[int, ...]:
        """Returns what the post-processor puts before a token that stands for a text."""
        with refusing("the tokenizer's post-processor cannot be used"):
            text = self._tokenizer.encode("", add_special_tokens=False)
            text.pad(1)
            encoding = self._tokenizer.post_process(text)
        return tuple(encoding.ids[: encoding.attention_mask.index(0)])

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,): uint16 if every id of the vocabulary fits, else uint32.

        Lone surrogates become U+FFFD.

        Raises:
            UserError: the tokenizer has no ids for a part of the text.
        """
        return self._ids(self._tokenizer, text)

    def encode_marked(self, text: str) -> np.ndarray:
        """Encodes `text` as `encode` does, but special tokens in it as such."""
        return self._ids(self._marked, text) if self.special else self.encode(text)

    @cached_property
    def _marked(self) -> "tokenizers.Tokenizer":
        made = deepcopy(self._tokenizer)  # threads share the other one
        made.encode_special_tokens = False
        return made

    def _ids(self, tokenizer: "tokenizers.Tokenizer", text: str) -> np.ndarray:
        with refusing(f"the {self.kind} tokenizer cannot encode a text"):
            # a batch of one is encoded in the calling thread, without the GIL
            [encoding] = tokenizer.encode_batch_fast(
                [replace_surrogates(text)], add_special_tokens=False
            )
        return np.array(encoding.ids, token_dtype(self.vocab_size))

    def end_ids(self) -> list[int]:
        """Returns the ids that end what a model writes."""
        return sorted(x for x in {self.eot_id, *self.stop_ids} if x is not None)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; broken UTF-8 and each id outside the vocabulary become U+FFFD."""
        runs = groupby(_flat(ids), self._known.__contains__)
        with refusing(f"the {self.kind} tokenizer cannot decode ids"):
            return "".join(
                self._tokenizer.decode([*run], skip_special_tokens=False)
                if known
                else REPLACEMENT * len([*run])
                for known, run in runs
            )

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""
        text, word = self.decode([id]), self._tokenizer.id_to_token(id) or ""
        if REPLACEMENT in text:
            if found := re.fullmatch("<0x(..)>", word):
                return bytes.fromhex(found[1])
            if BYTES.keys() >= {*word}:
                return bytes(BYTES[letter] for letter in word)
        return text.encode()

    def to_json(self) -> str:
        """Returns the file as it was read or made."""
        return self._content

    def save(self, path: Path) -> None:
        """Writes the tokenizer to `path`, or if that is a folder to `tokenizer.json` in it."""
        write_atomically(tokenizer_file(path), self.to_json().encode())


def _flat(ids: Iterable[int] | np.ndarray) -> list[int]:
    values = ids if hasattr(ids, "__array__") else list(ids)
    return np.asarray(values, np.int64).reshape(-1).tolist()


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns an error of the package, which may be a panic of Rust, into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {reason(error)}") from error


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates by U+FFFD and joins pairs, so that UTF-8 can encode the text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- made here ------------------------------------------------------------------------------------


class ByteTokenizer(Tokenizer):
    """Tokenizer whose tokens are the 256 bytes of UTF-8; lone surrogates become `?`."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__(json.dumps(_file(self.kind, LETTERS.values(), [])))

    def encode(self, text: str | bytes) -> np.ndarray:
        """Encodes `text` as its UTF-8 bytes, and bytes as they are: (N,) uint16."""
        data = text.encode(errors="replace") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)


class CharTokenizer(Tokenizer):
    """Tokenizer whose tokens are characters in code point order, none of them a surrogate."""

    kind = "chars"

    def __init__(self, chars: Iterable[str]) -> None:
        known = sorted(set(chars))
        if not known:
            raise UserError("a character tokenizer needs at least one character")
        super().__init__(json.dumps(_file(self.kind, known)))
        self._points = np.array([ord(char) for char in known], np.uint32)

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


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE of 50,257 tokens, which `tiktoken` encodes several times as fast."""

    kind = "gpt2"

    def __init__(self, content: str) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        super().__init__(content)
        ids = self._tokenizer.get_vocab().items()
        ranks = {bytes(BYTES[x] for x in word): id for word, id in ids if word != EOT}
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)}
        )

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,) uint16, without holding the GIL."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except ValueError:  # lone surrogates, or a million spaces before a word
            return super().encode(text)


class IdTokenizer(Tokenizer):
    """Stand-in for an unknown tokenizer: a text is its ids as numbers, "17 4 256"."""

    kind = "ids"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise UserError(f"vocab_size is {vocab_size}: expected 1 or more")
        self.vocab_size, self.special = vocab_size, {}
        self._content = json.dumps({"kind": self.kind, "vocab_size": vocab_size})

    def encode(self, text: str) -> np.ndarray:
        """Reads numbers as ids (N,); raises `UserError` for another word."""
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise UserError(f"{word!r} is not an id: expected 0 to {self.vocab_size - 1}")
        return np.array(text.split(), token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Writes ids as numbers."""
        return " ".join(map(str, _flat(ids)))

    def token_bytes(self, id: int) -> bytes:
        """Returns the number of an id."""
        return str(id).encode()


_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
    "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip
_WORDS = {"type": "WordLevel", "unk_token": ""}
_EACH = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
_PARTS: dict[str, tuple[Any, Any, Any]] = {
    "bytes": (_BPE, _LEVEL | {"add_prefix_space": False, "use_regex": False}, _LEVEL),
    "chars": (_WORDS, _EACH, {"type": "Fuse"}),
    "gpt2": (_BPE, _LEVEL | {"add_prefix_space": False}, _LEVEL),
}
"""Model, pre-tokenizer and decoder of a file of each kind."""


def _file(
    kind: str, words: Iterable[str], merges: Sequence[Sequence[str]] | None = None
) -> dict[str, Any]:
    """Returns the content of a `tokenizer.json` whose words have the ids from 0 on."""
    model, cut, decoder = _PARTS[kind]
    ids = {word: id for id, word in enumerate(words)}
    eot = {
        "id": ids.get(EOT), "content": EOT, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [eot] if EOT in ids else [], "normalizer": None, "pre_tokenizer": cut,
        "post_processor": None, "decoder": decoder,
        "model": model | {"vocab": ids} | ({} if merges is None else {"merges": [*merges]}),
    }  # fmt: skip


def _gpt2_file(merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return _file("gpt2", (*BYTES, *map("".join, merges), EOT), merges)


def _of_file(saved: dict[str, Any], content: str) -> Tokenizer:
    """Returns the tokenizer of a file, which is fast if the file is just as it is made here."""
    vocab, merges = saved["model"].get("vocab"), saved["model"].get("merges")
    if isinstance(vocab, dict):
        if saved == _file("bytes", LETTERS.values(), []):
            return ByteTokenizer()
        if saved == _file("chars", sorted(vocab)):
            return CharTokenizer(vocab)
        if merges and _sha256("#version: 0.2", *map(" ".join, merges), "") == GPT2_SHA256:
            return (GPT2Tokenizer if saved == _gpt2_file(merges) else Tokenizer)(content)
    return Tokenizer(content)


def _published_merges() -> list[list[str]]:
    """Reads GPT-2's merges as OpenAI published them, and downloads them if they are missing."""
    path = published_file(
        "vocab.bpe", GPT2_URL, sha256=GPT2_SHA256, what="GPT-2's",
        instead="vocab.bpe, as OpenAI published it (none is needed with --data.tokenizer bytes;"
        " fastgpt.prepare: --tokenizer bytes),",
    )  # fmt: skip
    return [line.split(" ") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def _sha256(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _of_0_2(saved: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer of a file that says its kind: of version 0.2, or of ids."""
    kind = saved["kind"]
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "chars":
        return CharTokenizer(saved["chars"])
    if kind == "ids":
        return IdTokenizer(int(saved["vocab_size"]))
    if kind != "gpt2":
        raise unknown_name("tokenizer", str(kind), ("bytes", "chars", "gpt2", "ids"))
    if _sha256(*saved["tokens"]) != GPT2_TOKENS_SHA256:
        raise ValueError("its tokens are not GPT-2's")
    words = ["".join(LETTERS[x] for x in base64.b64decode(token)) for token in saved["tokens"]]
    # a word was merged from what merging its letters with the earlier merges leaves
    ranks, merges = {word: rank for rank, word in enumerate(words)}, [[*x] for x in words[256:]]
    for parts in merges:
        while len(parts) > 2:
            found = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            best = found.index(min(found))
            parts[best : best + 2] = [words[found[best]]]
    return GPT2Tokenizer(json.dumps(_gpt2_file(merges)))


# --- trained --------------------------------------------------------------------------------------


def train_bpe(texts: Callable[[], Iterable[str]], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer like GPT-2's on `texts()`: the same texts, the same file.

    Its ids are `<|endoftext|>`, the 256 bytes, then merges of pairs that occur at least twice,
    until there are `vocab_size` tokens or no more pairs. Round trip: every text without lone
    surrogates. Memory: the distinct words of the texts, as the package stores them.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[EOT], initial_alphabet=[*BYTES],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(map(replace_surrogates, texts()), trainer)
    return Tokenizer(tokenizer.to_str())


def train_wordpiece(texts: Callable[[], Iterable[str]], vocab_size: int) -> Tokenizer:
    """Trains a WordPiece tokenizer like cased BERT's on `texts()`: the same texts, the same file.

    The texts are read twice.

    Its ids are `[UNK]`, `[SEP]` (the end of a text), the characters, each inside a word and at its
    start, then pieces of words that occur at least twice; fewer than `vocab_size` where there are
    no more. Characters take up to half of the vocabulary, the most frequent ones first. There is
    no `[PAD]`, `[CLS]` or `[MASK]`, because nothing here uses them. No round trip: white space is
    not kept, and a word with a character that is not in the vocabulary becomes `[UNK]`.
    """
    from tokenizers import Tokenizer as Theirs
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    counts = Counter[str]()
    for text in texts():
        counts.update(text)
    # BERT's normalizer keeps these
    visible = (c for c in counts if unicodedata.category(c)[0] not in "CZ" and c != REPLACEMENT)
    frequent = sorted(visible, key=lambda char: (-counts[char], char))
    chars = sorted(frequent[: vocab_size // 4])
    # The package would number the characters inside words, and choose among equally rare ones, in
    # the order of a hash table, which differs from run to run. So both are given: the former can
    # be given only as special tokens, which they no longer are in the final tokenizer.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=chars, limit_alphabet=len(chars),
        special_tokens=["[UNK]", "[SEP]", *(f"##{char}" for char in chars)], show_progress=False,
    )  # fmt: skip
    tokenizer = Theirs(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(map(replace_surrogates, texts()), trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:2]
    return Tokenizer(json.dumps(made))
