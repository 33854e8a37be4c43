"""Reads a source's texts piece by piece, in order and in bounded memory.

A piece is a document, or a part of a long one. Long texts are cut before a space between two
letters, or if there is none before white space after another character. GPT-2's BPE then gives the
parts the tokens of the whole, and so do the patterns of later GPTs at the first kind of place; a
tokenizer that prepends a mark to each text (Metaspace) adds one to each part.
"""

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from fastgpt.data.hub import load_splits
from fastgpt.errors import UserError

UTF_8 = "utf-8"
CHUNK_BYTES = 2**18
"""Number of bytes read from a file at a time."""
ROWS = 256
"""Number of rows read at a time from a Parquet file or the hub."""
MAX_PIECE = 2**24
"""Number of characters after which a text without white space is cut anywhere."""
MAX_DOCUMENT = 2**26
"""Number of characters without a separator that is an error: the separator seems to be wrong."""
MAX_LINE = 2**28
"""Number of bytes at which a line of JSON is cut: a compressed file may unpack to any size."""
WORD_ENDS = " \n\r\t"
CONTROLS = bytes([*range(0x08), *range(0x0E, 0x1B), 0x7F])
"""Control characters that texts do not use for white space, colours or overstriking."""
MOST_CONTROLS = 0.01
"""The largest share of control characters in a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of text, or a split of a data set of the hub."""

    path: str
    """Local path of the file, or `hf:owner/name/path` on the Hugging Face hub."""
    format: Literal["text", "jsonl", "parquet", "hub"]
    split: Literal["train", "val"] | None = None
    """Split that it belongs to, if its name says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files of text, and how to read them."""

    name: str
    """Short name, fit for a file name."""
    given: str
    """The name or path by which it was asked for."""
    files: tuple[File, ...]
    """Files in the order in which they are read."""
    separator: str | None = None
    """Text between the documents of a file; None: a file is one document."""
    field: str = "text"
    """The field or column that holds the text (JSON lines, Parquet, the hub)."""
    ends_lines: bool = False
    """Adds a newline to files that lack it, so that a folder's next file begins a new line."""
    encoding: str = UTF_8
    """Encoding of texts; JSON lines, Parquet and the hub are always UTF-8."""
    skipped: tuple[str, ...] = ()
    """Reasons why files of a folder or a pattern were skipped, one for each."""
    python: str | None = None
    """Python version of the built-in corpus; None for every other source."""
    revision: str | None = None
    """The commit of a data set of the hub, if it is known."""

    @property
    def split(self) -> Literal["named", "tail", "hash"]:
        """Method of holding out text: by file name, the end of the text, or documents by hash."""
        if self.files[0].split is not None:
            return "named"
        return "tail" if self.plain else "hash"

    @property
    def plain(self) -> bool:
        """True for plain texts, False for sets of documents."""
        return self.separator is None and all(file.format == "text" for file in self.files)


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of a long one."""

    text: str | bytes
    """Content: text, or bytes of UTF-8 if the source is read raw."""
    begins: bool
    """True if a document begins with this piece."""
    split: str | None
    """Split of the text; None: chosen by the document's hash."""
    done: int
    """Amount of the source that has been read with this piece, in the units of `source_size`."""


def read_pieces(source: Source, *, raw: bool = False) -> Iterator[Piece]:
    """Reads the pieces of a source.

    Args:
        raw: texts without a separator are read as bytes of UTF-8.
    Raises:
        UserError: a file cannot be read or has the wrong format; the message names the place.
    """
    before = 0
    for file in source.files:
        begins = True
        for text, done in _rows(source, file, raw):
            if text:
                yield Piece(text, begins or not source.plain, file.split, before + done)
                begins = False
        before += _size(file)


def source_size(source: Source) -> int:
    """Returns the size of all files: bytes on disk, rows for the hub."""
    return sum(map(_size, source.files))


def _size(file: File) -> int:
    return len(_hub_split(file)) if file.format == "hub" else os.path.getsize(file.path)


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file for reading, and decompresses it if its name ends in .gz or .zst.

    Yields:
        The stream of its content, and the file itself, whose position shows the progress.

    Raises:
        UserError: it cannot be read, is not compressed as its name says, or the package that reads
            Zstandard is missing.
    """
    try:
        with open(path, "rb") as raw, _unpacked(raw, path.lower()) as stream:
            yield stream, raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from error


def _unpacked(raw: BinaryIO, name: str) -> Any:
    if name.endswith(".gz"):
        return gzip.open(raw, "rb")
    if name.endswith(".zst"):
        unpacked = _pyarrow().input_stream(raw, compression="zstd")
        return io.BufferedReader(unpacked, CHUNK_BYTES)  # can iterate over lines
    return raw


def decoded(stream: BinaryIO, path: str, encoding: str) -> Iterator[tuple[bytes, str]]:
    """Decodes a file block by block.

    Yields:
        Each block as bytes of UTF-8, and the characters that it completes.
    Raises:
        UserError: bytes are invalid in the encoding, or too many are control characters.
    """
    decoder, offset, block = codecs.getincrementaldecoder(encoding)(), 0, b" "
    while block:
        block = stream.read(CHUNK_BYTES)
        waiting = decoder.getstate()[0]
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeError as error:
            data, start = waiting + block, getattr(error, "start", 0)
            place = f"byte 0x{data[start]:02X} at offset {offset - len(waiting) + start:,}"
            other = (
                "utf-16"
                if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                else "cp1252"
            )
            raise UserError(
                f"{path} is not {encoding.upper()} ({place}): if it is text, pass its encoding,"
                f" such as --encoding {other} (train.py: --data.encoding {other})"
            ) from error
        data = block if encoding == UTF_8 else text.encode(errors="replace")
        controls = len(data) - len(data.translate(None, CONTROLS))
        # a short block at the end of a long file may hold a few
        if controls > MOST_CONTROLS * (max(len(data), CHUNK_BYTES) if offset else len(data)):
            raise UserError(
                f"{path} is not text ({controls / len(data):.0%} control characters from offset"
                f" {offset:,} on): only text, JSON lines and Parquet can be read"
            )
        yield data, text
        offset += len(block)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "reading Parquet and .zst files needs pyarrow: pip install -c constraints.txt '.[data]'"
        ) from error
    return pyarrow


# --- readers --------------------------------------------------------------------------------------


def _rows(source: Source, file: File, raw: bool) -> Iterator[tuple[str | bytes, int]]:
    """Yields the text of each row, and the amount of the file that has been read."""
    if file.format == "hub":
        yield from _hub(file, source.field)
    elif file.format == "parquet":
        yield from _parquet(file.path, source.field)
    else:
        with opened(file.path) as (stream, on_disk):
            for text in _texts(stream, source, file, raw):
                yield text, on_disk.tell()


def _texts(stream: BinaryIO, source: Source, file: File, raw: bool) -> Iterator[str | bytes]:
    if file.format == "jsonl":
        return _json_lines(stream, file.path, source.field)
    blocks = decoded(stream, file.path, source.encoding)
    if source.separator is not None:
        return _between((text for _, text in blocks), source.separator, file.path)
    parts = (data for data, _ in blocks if data) if raw else _cut(text for _, text in blocks)
    return _ended_by(b"\n" if raw else "\n", parts) if source.ends_lines else parts


def _ended_by(newline: Any, parts: Iterator[Any]) -> Iterator[Any]:
    part = newline
    for part in parts:
        yield part
    if not part.endswith(newline):
        yield newline


def _between(blocks: Iterator[str], separator: str, path: str) -> Iterator[str]:
    """Yields the documents between separators, without the newlines around them.

    Each block is searched once, with the few characters before it that may begin a separator.
    """
    overlap = len(separator) - 1
    parts, carry, size, number = [], "", 0, 0
    for block in blocks:
        *whole, rest = (carry + block).split(separator)
        for document in whole:
            yield "".join((*parts, document)).strip("\r\n")
            parts, size, number = [], 0, number + 1
        keep = max(0, len(rest) - overlap)
        parts.append(rest[:keep])
        carry, size = rest[keep:], size + keep
        if size > MAX_DOCUMENT:
            raise UserError(
                f"{path}: no {separator!r} in {MAX_DOCUMENT:,} characters after document"
                f" {number:,}: is that the right --separator?"
            )
    yield "".join((*parts, carry)).strip("\r\n")


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


def _json_lines(stream: BinaryIO, path: str, field: str) -> Iterator[str]:
    lines = iter(lambda: stream.readline(MAX_LINE), b"")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _field_of(line, field, f"{path} line {number:,}")


def _field_of(line: bytes, field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON, expected one object per line ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{place} is of type {type(record).__name__}: expected one object per line")
    if field not in record:
        raise UserError(
            f"{place} has no field {field!r}: pass the one that holds the text with --field"
            f" (fields: {', '.join(record) or 'none'})"
        )
    text = "" if record[field] is None else record[field]  # like an empty field of Parquet
    if not isinstance(text, str):
        raise UserError(
            f"{place}: field {field!r} is of type {type(text).__name__}, expected a string"
        )
    # halves of surrogate pairs, which JSON can hold but UTF-8 cannot, become `?`
    return text if text.isascii() else text.encode(errors="replace").decode()


def _parquet(path: str, field: str) -> Iterator[tuple[str, int]]:
    arrow, row, size = _pyarrow(), 0, os.path.getsize(path)
    try:
        # by default a whole row group, possibly the whole file, would be held in memory
        options = {"pre_buffer": False, "buffer_size": 2**20}
        with arrow.parquet.ParquetFile(path, **options) as table:
            kinds = {column.name: str(column.type) for column in table.schema_arrow}
            _check_column(kinds, field, path)
            for batch in table.iter_batches(ROWS, columns=[field], use_threads=False):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield text or "", size * row // table.metadata.num_rows
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read {path} after row {row:,}: {reason}") from error


def _hub_split(file: File) -> Any:
    return load_splits(file.path)[file.split or "train"]


def _hub(file: File, field: str) -> Iterator[tuple[str, int]]:
    split, row = _hub_split(file), 0
    kinds = {name: str(getattr(kind, "dtype", kind)) for name, kind in split.features.items()}
    _check_column(kinds, field, file.path)
    for batch in split.select_columns([field]).iter(ROWS):
        for text in batch[field]:
            row += 1
            yield text or "", row


def _check_column(kinds: dict[str, str], field: str, path: str) -> None:
    if kinds.get(field) not in ("string", "large_string", "string_view"):
        found = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(
            f"{path} has no column {field!r} of text: pass the one that holds the text with --field"
            f" (columns: {found})"
        )
