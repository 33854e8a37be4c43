"""Groups texts into batches, and tokenizes a batch.

Batches depend on the text alone: reading on from the end of one gives the same next ones.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from fastgpt.data.corpus import SPLITS
from fastgpt.data.prepare.documents import Piece, read_pieces
from fastgpt.data.prepare.sources import Source
from fastgpt.data.shards import token_dtype
from fastgpt.data.tokenizers import Tokenizer

BATCH_CHARACTERS = 2**19
"""Number of characters that one thread tokenizes at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Position in a source between two batches."""

    file: int = 0
    row: int = 0
    """Row of that file; see `read_pieces`."""
    done: int = 0
    """Amount of that file that has been read, in the units of `source_size`."""
    length: int = 0
    """Number of characters (bytes, if read raw) read so far."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of text, or the part of it that belongs to one split."""

    text: str | bytes
    begins: bool
    """True if a document begins with this piece."""
    split: str | None
    """Split of the text; None: chosen by the document's hash."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens and counts of a batch, by split."""

    tokens: dict[str, np.ndarray]
    num_bytes: dict[str, int]
    """Bytes of UTF-8 that the tokens stand for."""
    documents: dict[str, int]
    digest: bytes
    """Sha256 of the texts."""


def batches(
    source: Source, place: Place, *, raw: bool, tail_starts: int | None
) -> Iterator[tuple[list[Part], Place]]:
    """Groups the texts of a source from `place` on; yields batches and the place after each.

    Args:
        place: end of an earlier batch, or `Place()`.
        raw: see `read_pieces`.
        tail_starts: length of the text before the held-out tail; None: files or hashes decide.
    """
    parts, size, length, piece = [], 0, place.length, None
    for piece in read_pieces(source, raw=raw, file=place.file, row=place.row):
        parts += _split(piece, length, source, tail_starts)
        length, size = length + len(piece.text), size + len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield parts, Place(file=piece.file, row=piece.row, done=piece.done, length=length)
            parts, size = [], 0
    if piece is not None and parts:
        yield parts, Place(file=piece.file, row=piece.row, done=piece.done, length=length)


def _split(piece: Piece, length: int, source: Source, tail_starts: int | None) -> Iterator[Part]:
    """Cuts `piece`, which has `length` characters before it, where the held-out tail begins."""
    if tail_starts is None:
        yield Part(piece.text, piece.begins, source.files[piece.file].split)
        return
    cut = tail_starts - length
    if cut > 0:
        yield Part(piece.text[:cut], piece.begins, "train")
    if cut < len(piece.text):
        yield Part(piece.text[max(0, cut) :], piece.begins and cut <= 0, "val")


def encode(
    parts: list[Part], tokenizer: Tokenizer, *, val_fraction: float, ends_documents: bool
) -> Encoded:
    """Tokenizes a batch, with an end-of-text token before each document if the tokenizer has one.

    Args:
        parts: from `batches`.
        val_fraction: fraction of documents held out, if their hash decides.
        ends_documents: without an end-of-text token, make each document end in a newline.
    """
    found: dict[str, list[Part]] = {split: [] for split in SPLITS}
    num_bytes: dict[str, int] = dict.fromkeys(SPLITS, 0)
    digest = hashlib.sha256()
    for part in parts:
        text = part.text
        data = text if isinstance(text, bytes) else text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
        split = part.split or SPLITS[held_out(data, val_fraction)]
        ends = not ends_documents or tokenizer.eot_id is not None or data.endswith(b"\n")
        if isinstance(text, str) and not ends:
            text, data = text + "\n", data + b"\n"
        found[split].append(Part(text, part.begins, split))
        num_bytes[split] += len(data)
    tokens = {split: _tokens(mine, tokenizer) for split, mine in found.items()}
    documents = {split: sum(part.begins for part in mine) for split, mine in found.items()}
    return Encoded(tokens, num_bytes, documents, digest.digest())


def _tokens(parts: list[Part], tokenizer: Tokenizer) -> np.ndarray:
    dtype = token_dtype(tokenizer.vocab_size)
    arrays = [np.empty(0, dtype)]
    for begin, group in groupby(parts, lambda part: part.begins):
        texts: list[Any] = [part.text for part in group]  # bytes for the bytes tokenizer only
        if begin and tokenizer.eot_id is not None:
            arrays.append(tokenizer.encode_documents(texts))
        else:
            arrays += [tokenizer.encode(text) for text in texts]
    return np.concatenate(arrays).astype(dtype, copy=False)


def held_out(document: bytes, fraction: float) -> bool:
    """Decides by its hash if a document is held out, so that all copies are treated alike."""
    draw = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") / 2**64
    return draw < fraction
