"""GPT-2's byte-pair encoding, from the merges that OpenAI published, through `tiktoken`."""

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import tiktoken
from tokenizers import AddedToken, models

from fastgpt.data.download import published_file
from fastgpt.data.tokenizers.huggingface import BYTES, LETTERS, JsonTokenizer, byte_level
from fastgpt.data.tokenizers.plain import Tokenizer, id_array

EOT = "<|endoftext|>"
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/models/124M/vocab.bpe"
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# Pattern that cuts text into words before bytes are merged (openai/gpt-2, src/encoder.py), in
# tiktoken's form, which cuts at the same places with less backtracking.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)


class GPT2Tokenizer(Tokenizer):
    """Byte-level BPE with GPT-2's 50,257 tokens.

    The text `<|endoftext|>` is encoded as the ordinary text it is; only `eot_id` ends a document.
    Round trip: every text without lone surrogates, which become U+FFFD.

    Args:
        tokens: the bytes of ids 0 to 50,255, which are also the order of the merges.
    Raises:
        ValueError: the number of distinct tokens is wrong.
    """

    kind = "gpt2"
    vocab_size = 50_257
    eot_id = 50_256

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tuple(tokens)
        if len(set(self.tokens)) != self.vocab_size - 1:
            raise ValueError(f"{len(set(self.tokens))} tokens, expected {self.vocab_size - 1}")
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens)},
            special_tokens={EOT: len(self.tokens)},
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def published(cls) -> "GPT2Tokenizer":
        """Builds the tokenizer from OpenAI's merges, which are downloaded if they are missing.

        Raises:
            UserError: `vocab.bpe` in `data_dir()` has another sha256, or is missing and cannot be
                downloaded.
        """
        path = published_file(
            "vocab.bpe", GPT2_URL, sha256=GPT2_SHA256, what="GPT-2's",
            instead="vocab.bpe, as OpenAI published it (none is needed with --data.tokenizer bytes;"
            " fastgpt.prepare: --tokenizer bytes),",
        )  # fmt: skip
        _, *merges = path.read_text(encoding="utf-8").splitlines()
        words = [*LETTERS.values(), *(merge.replace(" ", "") for merge in merges)]
        return cls([bytes(BYTES[letter] for letter in word) for word in words])

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,) uint16, without holding the GIL."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except ValueError:  # lone surrogates, or a million spaces before a word
            return self.slower.encode(text)

    @cached_property
    def slower(self) -> JsonTokenizer:
        """The same tokenizer of the package `tokenizers`, which takes every text."""
        ids = {word: i for i, word in enumerate((*map(_spelled, self.tokens), EOT))}
        pairs = [(_spelled(a), _spelled(b)) for a, b in merges(self.tokens)]
        made = byte_level(models.BPE(ids, pairs))
        made.add_special_tokens([AddedToken(EOT, normalized=False)])
        return JsonTokenizer(made.to_str())

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; broken UTF-8 and ids outside the vocabulary become U+FFFD."""
        values = id_array(ids).tolist()
        pieces = [self.token_bytes(i) if 0 <= i < self.vocab_size else b"\xff" for i in values]
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""
        return EOT.encode() if id == self.eot_id else self.tokens[id]

    def to_json(self) -> str:
        """Returns the kind and all tokens as 0.8 MB of JSON, so that no other file is needed."""
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return json.dumps({"kind": self.kind, "tokens": tokens})


def merges(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Returns the pair that each token of BPE was merged from, in the order of the tokens.

    Single bytes have none. A token's pair is what merging its bytes with the earlier ones leaves.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = []
    for token in tokens:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
            parts[best : best + 2] = [pairs[best]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def _spelled(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)
