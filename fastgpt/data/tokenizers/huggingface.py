"""Tokenizers of the `tokenizers` package: any `tokenizer.json`, and BPE and WordPiece trained here.

Files are written in Hugging Face's own format, so that other programs can read them.

Threads: the package splits a batch among its own threads, but encodes a batch of one in the calling
thread, without the GIL. Calls from several threads thus run in parallel, and no further threads
compete with them; `TOKENIZERS_PARALLELISM` matters for training only.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fastgpt.data.shards import token_dtype
from fastgpt.data.tokenizers.plain import Tokenizer, id_array, replace_surrogates
from fastgpt.errors import UserError, reason
from fastgpt.terminal import REPLACEMENT

_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PLAIN)
LETTERS = {byte: chr(byte) for byte in _PLAIN} | {
    byte: chr(256 + i) for i, byte in enumerate(_OTHERS)
}
"""Printable character that stands for each byte in byte-level BPE, in the order of GPT-2's ids."""
BYTES = {letter: byte for byte, letter in LETTERS.items()}

EOT_TOKENS = (
    "<|endoftext|>",  # GPT-2, GPT-NeoX, Qwen
    "<|end_of_text|>",  # Llama 3
    "</s>",  # Llama 2, Mistral, T5
    "<eos>",  # Gemma
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "[SEP]",  # BERT
)
"""Usual names of the token that ends a text; the first that a vocabulary has is its `eot_id`."""


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


class JsonTokenizer(Tokenizer):
    """Tokenizer that a Hugging Face `tokenizer.json` describes.

    Special tokens in a text are encoded as ordinary text, none are added, and nothing is truncated
    or padded, whatever the file asks for. Round trip: as far as the file's own steps allow; see
    `train_bpe` for its own.

    Args:
        content: the text of the file, which `to_json` and `save` return unchanged.

    Raises:
        UserError: the `tokenizers` package cannot read it, or the vocabulary is empty.
    """

    def __init__(self, content: str) -> None:
        self._content = content
        with refusing("not a tokenizer that the tokenizers package can read"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("the vocabulary of the tokenizer is empty")
        self._known = np.array(sorted(vocabulary.values()), np.int64)
        self.kind = type(self._tokenizer.model).__name__.lower()
        self.vocab_size = int(self._known[-1]) + 1  # ids may have gaps
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        """Ids of special tokens, which `encode` takes for text."""
        self.eot_id = next((vocabulary[name] for name in EOT_TOKENS if name in vocabulary), None)
        self.begin_ids = self._begin_ids()

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,): uint16 if every id of the vocabulary fits, else uint32.

        Lone surrogates become U+FFFD.

        Raises:
            UserError: the tokenizer has no ids for a part of the text.
        """
        return self._ids(self._tokenizer, text)

    def encode_marked(self, text: str) -> np.ndarray:
        """Encodes `text` as `encode` does, but special tokens in it as such."""
        return self._ids(self._marked, text)

    def _ids(self, tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
        with refusing(f"the {self.kind} tokenizer cannot encode a text"):
            [encoding] = tokenizer.encode_batch_fast(
                [replace_surrogates(text)], add_special_tokens=False
            )
        return np.array(encoding.ids, token_dtype(self.vocab_size))

    @cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        made = deepcopy(self._tokenizer)  # threads share the other one
        made.encode_special_tokens = False
        return made

    def _begin_ids(self) -> tuple[int, ...]:
        """Returns what the post-processor puts before a token that stands for a text."""
        with refusing("the tokenizer's post-processor cannot be used"):
            text = self._tokenizer.encode("", add_special_tokens=False)
            text.pad(1)
            encoding = self._tokenizer.post_process(text)
        return tuple(encoding.ids[: encoding.attention_mask.index(0)])

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; each id outside the vocabulary becomes U+FFFD."""
        values = id_array(ids)
        known = np.isin(values, self._known)
        cuts = np.flatnonzero(np.diff(known)) + 1
        with refusing(f"the {self.kind} tokenizer cannot decode ids"):
            return "".join(
                self._tokenizer.decode(run.tolist(), skip_special_tokens=False)
                if run.size and known[start]
                else REPLACEMENT * run.size
                for start, run in zip((0, *cuts), np.split(values, cuts), strict=True)
            )

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""
        word = self._tokenizer.id_to_token(id) or ""
        if REPLACEMENT in self.decode([id]):
            if found := re.fullmatch("<0x(..)>", word):
                return bytes.fromhex(found[1])
            if BYTES.keys() >= {*word}:
                return bytes(BYTES[letter] for letter in word)
        return super().token_bytes(id)

    def to_json(self) -> str:
        """Returns the file as it was read, or as training wrote it."""
        return self._content


def byte_level(model: models.BPE, *, use_regex: bool = True) -> tokenizers.Tokenizer:
    """Returns a tokenizer that merges bytes, within GPT-2's words unless `use_regex` is false."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_bpe(texts: Callable[[], Iterable[str]], vocab_size: int) -> JsonTokenizer:
    """Trains a byte-level BPE tokenizer like GPT-2's on `texts()`: the same texts, the same file.

    Its ids are `<|endoftext|>`, the 256 bytes, then merges of pairs that occur at least twice,
    until there are `vocab_size` tokens or no more pairs. Round trip: every text without lone
    surrogates. Memory: the distinct words of the texts, as the package stores them.
    """
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(replace_surrogates, texts()), trainer)
    return JsonTokenizer(tokenizer.to_str())


def train_wordpiece(texts: Callable[[], Iterable[str]], vocab_size: int) -> JsonTokenizer:
    """Trains a WordPiece tokenizer like cased BERT's on `texts()`: the same texts, the same file.

    The texts are read twice.

    Its ids are `[UNK]`, `[SEP]` (the end of a text), the characters, each inside a word and at its
    start, then pieces of words that occur at least twice; fewer than `vocab_size` where there are
    no more. Characters take up to half of the vocabulary, the most frequent ones first. There is
    no `[PAD]`, `[CLS]` or `[MASK]`, because nothing here uses them. No round trip: white space is
    not kept, and a word with a character that is not in the vocabulary becomes `[UNK]`.
    """
    # The package would number the characters inside words, and choose among equally rare ones, in
    # the order of a hash table, which differs from run to run. So both are given: the former can
    # be given only as special tokens, which they no longer are in the final tokenizer.
    special = ["[UNK]", "[SEP]"]
    chars = _frequent_characters(texts(), vocab_size // 4)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*special, *(f"##{char}" for char in chars)],
        initial_alphabet=chars,
        limit_alphabet=len(chars),
        show_progress=False,
    )
    draft = _wordpiece(None)
    draft.train_from_iterator(map(replace_surrogates, texts()), trainer)
    tokenizer = _wordpiece(draft.get_vocab())
    tokenizer.add_special_tokens(special)
    return JsonTokenizer(tokenizer.to_str())


def _wordpiece(vocabulary: dict[str, int] | None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _frequent_characters(texts: Iterable[str], count: int) -> list[str]:
    """Returns the most frequent characters that BERT's normalizer keeps, in code point order."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    visible = (c for c in counts if unicodedata.category(c)[0] not in "CZ" and c != REPLACEMENT)
    return sorted(sorted(visible, key=lambda char: (-counts[char], char))[:count])
