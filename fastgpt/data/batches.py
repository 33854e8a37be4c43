"""Groups texts into batches, which depend on the text alone, and tokenizes a batch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from fastgpt.data.corpus import SPLITS
from fastgpt.data.reading import Piece, Source, read_pieces
from fastgpt.data.shards import token_dtype
from fastgpt.data.tokenizers import Tokenizer

BATCH_CHARACTERS = 2**19
"""Number of characters that one thread tokenizes at a time."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens and counts of a batch, by split."""

    tokens: dict[str, np.ndarray]
    num_bytes: dict[str, int]
    """Bytes of UTF-8 that the tokens stand for."""
    documents: dict[str, int]
    digest: bytes
    """Sha256 of the texts."""


def batches(source: Source, *, raw: bool, tail_starts: int | None) -> Iterator[list[Piece]]:
    """Yields lists of pieces of about `BATCH_CHARACTERS` characters, each tokenized by one thread.

    Args:
        raw: see `read_pieces`.
        tail_starts: length of the text before the held-out tail; None: files or hashes decide.
    """
    batch, size, length = [], 0, 0
    for piece in read_pieces(source, raw=raw):
        batch += [piece] if tail_starts is None else _split(piece, max(0, tail_starts - length))
        size, length = size + len(piece.text), length + len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _split(piece: Piece, cut: int) -> list[Piece]:
    """Cuts `piece` where the held-out tail begins."""
    parts = (
        replace(piece, text=piece.text[:cut], split="train"),
        replace(piece, text=piece.text[cut:], split="val", begins=piece.begins and cut == 0),
    )
    return [part for part in parts if part.text]


def encode(
    batch: list[Piece], tokenizer: Tokenizer, *, val_fraction: float, ends_documents: bool
) -> Encoded:
    """Tokenizes a batch, with an end-of-text token before each document if the tokenizer has one.

    Args:
        val_fraction: fraction of documents held out, if their hash decides.
        ends_documents: without an end-of-text token, make each document end in a newline.
    """
    found: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    num_bytes: dict[str, int] = dict.fromkeys(SPLITS, 0)
    digest = hashlib.sha256()
    for piece in batch:
        text = piece.text
        data = text if isinstance(text, bytes) else text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
        split = piece.split or SPLITS[held_out(data, val_fraction)]
        ends = not ends_documents or tokenizer.eot_id is not None or data.endswith(b"\n")
        if isinstance(text, str) and not ends:
            piece, data = replace(piece, text=text + "\n"), data + b"\n"
        found[split].append(piece)
        num_bytes[split] += len(data)
    tokens = {split: _tokens(pieces, tokenizer) for split, pieces in found.items()}
    documents = {split: sum(piece.begins for piece in found[split]) for split in SPLITS}
    return Encoded(tokens, num_bytes, documents, digest.digest())


def _tokens(pieces: list[Piece], tokenizer: Tokenizer) -> np.ndarray:
    dtype = token_dtype(tokenizer.vocab_size)
    arrays = [np.empty(0, dtype)]
    for begins, group in groupby(pieces, lambda piece: piece.begins):
        texts: list[Any] = [piece.text for piece in group]  # bytes for the bytes tokenizer only
        if begins and tokenizer.eot_id is not None:
            arrays.append(tokenizer.encode_documents(texts))
        else:
            arrays += [tokenizer.encode(text) for text in texts]
    return np.concatenate(arrays).astype(dtype, copy=False)


def held_out(document: bytes, fraction: float) -> bool:
    """Decides by its hash if a document is held out, so that all copies are treated alike."""
    draw = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") / 2**64
    return draw < fraction
