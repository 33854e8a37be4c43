"""GPT-2's byte-pair encoding, from the merges that OpenAI published, through `tiktoken`."""

import base64
import itertools
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
import tiktoken

from fastgpt.data.download import published_file
from fastgpt.data.tokenizers.plain import Tokenizer, id_array, replace_surrogates

EOT = "<|endoftext|>"
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/models/124M/vocab.bpe"
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PLAIN)
LETTERS = {byte: chr(byte) for byte in _PLAIN} | {
    byte: chr(256 + i) for i, byte in enumerate(_OTHERS)
}
"""Printable character that stands for each byte in byte-level BPE, in the order of GPT-2's ids."""
# Pattern that cuts text into words before bytes are merged (openai/gpt-2, src/encoder.py), in
# tiktoken's form, which cuts at the same places with less backtracking.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
# White space of Unicode; Python's \s has four more control characters.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LONG_RUN = re.compile(f"[{_SPACE}]{{10000,}}(?=[{_SPACE}][^{_SPACE}])")


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
            instead="--data.tokenizer bytes (fastgpt.prepare: --tokenizer bytes) needs no file;"
            " vocab.bpe, as OpenAI published it,",
        )  # fmt: skip
        _, *merges = path.read_text(encoding="utf-8").splitlines()
        of_letter = {letter: byte for byte, letter in LETTERS.items()}
        words = [*LETTERS.values(), *(merge.replace(" ", "") for merge in merges)]
        return cls([bytes(of_letter[letter] for letter in word) for word in words])

    def encode(self, text: str) -> np.ndarray:
        """Encodes `text` as ids (N,) uint16, without holding the GIL."""
        try:
            ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self.encode(replace_surrogates(text))
        except ValueError:
            # the pattern cannot backtrack over a million spaces before a word
            parts = _cut_long_runs(text)
            if len(parts) == 1:
                raise
            return np.concatenate([self.encode(part) for part in parts])
        return ids.astype(np.uint16)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decodes ids to text; broken UTF-8 and ids outside the vocabulary become U+FFFD."""
        known = (*self.tokens, EOT.encode())
        values = id_array(ids).tolist()
        pieces = [known[i] if 0 <= i < self.vocab_size else b"\xff" for i in values]
        return b"".join(pieces).decode(errors="replace")

    def to_json(self) -> str:
        """Returns the kind and all tokens as 0.8 MB of JSON, so that no other file is needed."""
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return json.dumps({"kind": self.kind, "tokens": tokens})


def _cut_long_runs(text: str) -> list[str]:
    """Cuts before the last character of each long run of white space that a word follows.

    The pattern always ends a token there, so the parts have the same tokens as the whole.
    """
    cuts = (match.end() for match in _LONG_RUN.finditer(text))
    return [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text)))]
