"""Reads a source's texts piece by piece, in order, in bounded memory and from any position on.

A piece is a document, or a part of a long one. Long texts are cut before a space between two
letters, or if there is none before white space after another character. GPT-2's BPE then gives the
parts the tokens of the whole, and so do the patterns of later GPTs at the first kind of place; a
tokenizer that prepends a mark to each text (Metaspace) adds one to each part.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from fastgpt.data.prepare.files import CHUNK_BYTES, File, opened, pyarrow
from fastgpt.data.prepare.hub import open_split
from fastgpt.data.prepare.sources import Source
from fastgpt.data.prepare.text import UTF_8, TextDecoder
from fastgpt.errors import UserError

MAX_PIECE = 2**24
"""Number of characters after which a text without white space is cut anywhere."""
MAX_DOCUMENT = 2**26
"""Number of characters without a separator that is an error: the separator seems to be wrong."""
WORD_ENDS = " \n\r\t"
ROWS = 256
"""Number of rows read at a time from a Parquet file or the hub."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of a long one."""

    text: str | bytes
    """Content: text, or bytes of UTF-8 if the source is read raw."""
    begins: bool
    """True if a document begins with this piece."""
    file: int
    """Index of its file in the source."""
    row: int
    """Row of the file after this piece, for `read_pieces`."""
    done: int
    """Amount of the file that has been read, in the units of `source_size`."""


def read_pieces(source: Source, *, raw: bool, file: int = 0, row: int = 0) -> Iterator[Piece]:
    """Reads the pieces of a source from (file, row) on.

    Args:
        raw: texts without a separator are read as bytes of UTF-8.
        file: index into `source.files`.
        row: from an earlier `Piece`.
    Raises:
        UserError: a file cannot be read or has the wrong format; the message names the place.
    """
    for number in range(file, len(source.files)):
        behind = row if number == file else 0
        for text, begins, after, done in _rows(source, source.files[number], raw, behind):
            if text and after > behind:
                yield Piece(text, begins, number, after, done)


def source_size(source: Source) -> list[int]:
    """Returns the size of each file: bytes on disk, rows for the hub."""
    return [_size(file) for file in source.files]


def scan(source: Source, *, raw: bool) -> tuple[int, str]:
    """Reads a whole text to find its length and hash.

    Returns:
        Its length, in bytes if it is read raw, else in characters; and the sha256 of its bytes.
    Raises:
        UserError: a file cannot be read, or is not text in the source's encoding.
    """
    length, digest = 0, hashlib.sha256()
    for piece in read_pieces(source, raw=raw):
        length += len(piece.text)
        digest.update(piece.text if isinstance(piece.text, bytes) else piece.text.encode())
    return length, digest.hexdigest()


_Row = tuple[str | bytes, bool, int, int]
"""Text, True if a document begins with it, the row after it, and the amount of the file read."""


def _rows(source: Source, file: File, raw: bool, row: int) -> Iterator[_Row]:
    """Reads the rows after `row`, and earlier ones too if skipping them saves nothing."""
    if file.format == "parquet":
        return _parquet(file, source.field, row)
    if file.format == "hub":
        return _hub(file, source.field, row)
    if file.format == "jsonl":
        return _json_lines(file, source.field, row)
    if source.separator is not None:
        return _separated(file, source.encoding, source.separator)
    return _text(file, source.encoding, raw, source.ends_lines)


def _size(file: File) -> int:
    return open_split(file).num_rows if file.format == "hub" else os.path.getsize(file.path)


# --- texts ----------------------------------------------------------------------------------------


def _text(file: File, encoding: str, raw: bool, ends_lines: bool) -> Iterator[_Row]:
    with opened(file.path) as (stream, on_disk):
        last: str | bytes = ""
        number = 0
        blocks = _decoded(stream, file.path, encoding)
        parts = _utf_8(blocks, encoding) if raw else _cut(text for _, text in blocks)
        for number, part in enumerate(parts, start=1):
            last = part
            yield part, number == 1, number, on_disk.tell()
        newline = b"\n" if raw else "\n"
        if ends_lines and last and last[-1:] != newline:
            yield newline, False, number + 1, on_disk.tell()


def _separated(file: File, encoding: str, separator: str) -> Iterator[_Row]:
    """Yields the documents between separators, without the newlines around them."""
    with opened(file.path) as (stream, on_disk):
        blocks = (text for _, text in _decoded(stream, file.path, encoding))
        parts = _between(blocks, separator, file.path)
        for number, document in enumerate(parts, start=1):
            yield document.strip("\r\n"), True, number, on_disk.tell()


def _between(blocks: Iterator[str], separator: str, path: str) -> Iterator[str]:
    """Splits a text at separators. Each block is searched once, with the few characters before it
    that may begin a separator."""
    overlap = len(separator) - 1
    parts, carry, size, number = [], "", 0, 0
    for block in blocks:
        *whole, rest = (carry + block).split(separator)
        for document in whole:
            yield "".join((*parts, document))
            parts, size, number = [], 0, number + 1
        keep = max(0, len(rest) - overlap)
        parts.append(rest[:keep])
        carry, size = rest[keep:], size + keep
        if size > MAX_DOCUMENT:
            raise UserError(
                f"{path}: no {separator!r} in {MAX_DOCUMENT:,} characters after document"
                f" {number:,}: is that the right --separator?"
            )
    yield "".join((*parts, carry))


def _decoded(stream: BinaryIO, path: str, encoding: str) -> Iterator[tuple[bytes, str]]:
    """Yields the blocks of a file, each with the characters that it completes."""
    decoder, block = TextDecoder(path, encoding), b" "
    while block:
        block = stream.read(CHUNK_BYTES)
        yield block, decoder.decode(block, final=not block)


def _utf_8(blocks: Iterator[tuple[bytes, str]], encoding: str) -> Iterator[bytes]:
    for block, text in blocks:
        if data := block if encoding == UTF_8 else text.encode(errors="replace"):
            yield data


def _cut(texts: Iterator[str]) -> Iterator[str]:
    """Cuts a text into parts that end where a word does."""
    rest = ""
    for text in texts:
        rest += text
        place = _last_cut(rest)
        if place == 0 and len(rest) >= MAX_PIECE:
            place = len(rest)
        if place:
            yield rest[:place]
            rest = rest[place:]
    if rest:
        yield rest


def _last_cut(text: str) -> int:
    """Finds the last place in `text` to cut before; 0 if there is none."""
    place = len(text)
    while (place := text.rfind(" ", 1, place)) > 0:
        if text[place - 1].isalpha() and text[place + 1 : place + 2].isalpha():
            return place
    place = len(text)
    while (place := max(text.rfind(space, 0, place) for space in WORD_ENDS)) > 0:
        while place > 0 and text[place - 1].isspace():
            place -= 1
        if place > 0 and text[place] in WORD_ENDS:
            return place
    return 0


# --- documents ------------------------------------------------------------------------------------


def _json_lines(file: File, field: str, row: int) -> Iterator[_Row]:
    with opened(file.path) as (stream, on_disk):
        for number, line in enumerate(stream, start=1):
            if number > row and line.strip():
                place = f"{file.path} line {number:,}"
                yield _field_of(line, field, place), True, number, on_disk.tell()


def _field_of(line: bytes, field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.lstrip().startswith(b"["):
            reason = f"is not JSON, expected one object per line ({error})"
            raise UserError(f"{place} {reason}") from error
        record = []  # a JSON array over several lines
    if not isinstance(record, dict):
        what = "a JSON array" if isinstance(record, list) else _kind_of(record)
        raise UserError(f"{place} is {what}; write one object per line")
    if field not in record:
        found = ", ".join(record) or "none"
        raise UserError(
            f"{place} has no field {field!r}: pass the one that holds the text with --field"
            f" (fields: {found})"
        )
    text = record[field]
    if text is None:
        return ""  # like an empty field of Parquet
    if not isinstance(text, str):
        raise UserError(f"{place}: field {field!r} is {_kind_of(text)}, expected a string")
    return _without_surrogates(text)


def _kind_of(value: object) -> str:
    """Names the type of a JSON value, with its article."""
    kinds = {str: "a string", bool: "a boolean", list: "an array", dict: "an object"}
    return kinds.get(type(value), "null" if value is None else "a number")


def _without_surrogates(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON can hold but UTF-8 cannot, by `?`."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _parquet(file: File, field: str, row: int) -> Iterator[_Row]:
    arrow, number = pyarrow(), 0
    try:
        # by default a whole row group, possibly the whole file, would be held in memory
        options = {"pre_buffer": False, "buffer_size": 2**20}
        with arrow.parquet.ParquetFile(file.path, **options) as table:
            schema = table.schema_arrow
            kinds = {name: str(schema.field(name).type) for name in schema.names}
            _check_column(kinds, field, file.path)
            total, size = table.metadata.num_rows, os.path.getsize(file.path)
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if number + rows <= row:
                    number += rows
                    continue
                for batch in table.iter_batches(
                    ROWS, row_groups=[group], columns=[field], use_threads=False
                ):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        if number > row:
                            yield text or "", True, number, size * number // total
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read {file.path} after row {number:,}: {reason}") from error


def _check_column(kinds: dict[str, str], field: str, path: str) -> None:
    if kinds.get(field) not in ("string", "large_string", "string_view"):
        found = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(
            f"{path} has no column {field!r} of text: pass the one that holds the text with --field"
            f" (columns: {found})"
        )


def _hub(file: File, field: str, row: int) -> Iterator[_Row]:
    split = open_split(file)
    kinds = {name: str(getattr(kind, "dtype", kind)) for name, kind in split.features.items()}
    _check_column(kinds, field, file.path)
    if row >= split.num_rows:
        return
    number = row
    for batch in split.select_columns([field]).skip(row).iter(ROWS):
        for text in batch[field]:
            number += 1
            yield text or "", True, number, number
