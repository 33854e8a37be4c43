"""Reads a source's texts chunk by chunk, in order and in bounded memory.

A chunk is a document, or a part of a long one. Long texts are cut before a space between two
letters, or if there is none before white space after another character. GPT-2's BPE then gives the
parts the tokens of the whole, and so do the patterns of later GPTs at the first kind of place; a
tokenizer that prepends a mark to each text (Metaspace) adds one to each part.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from fastgpt.commands import install_command
from fastgpt.errors import UserError, reason, shown

UTF_8 = "utf-8"
CHUNK_BYTES = 2**18
"""Number of bytes read from a file at a time."""
BATCH_ROWS = 256
"""Number of rows read at a time from a Parquet file or the hub."""
MAX_CHUNK = 2**24
"""Number of characters after which a text without white space is cut anywhere."""
MAX_DOCUMENT = 2**26
"""Number of characters without a separator that is an error: the separator seems to be wrong."""
MAX_LINE = 2**28
"""Number of bytes at which a line of JSON is cut: a compressed file may unpack to any size."""
HUB_NAME = re.compile(r"hf:(?P<path>[\w.-]+/[\w.-]+)(/(?P<name>[\w.-]+))?(@(?P<revision>\S+))?")
WORD_ENDS = " \n\r\t"
MOST_NULS = 0.01
"""The largest share of NUL characters in a text; UTF-16 that is read as UTF-8 has a half."""


class SourceFile(NamedTuple):
    """A file of a source."""

    path: str
    """Local path, or `hf:owner/name/path` on the Hugging Face hub."""
    split: Literal["train", "val"] | None = None
    """Split that it belongs to, if its name says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files of one format, and how to read them."""

    name: str
    """Short name, fit for a file name."""
    given: str
    """The name or path by which it was asked for."""
    files: tuple[SourceFile, ...]
    """Files in the order in which they are read."""
    format: Literal["text", "jsonl", "parquet", "arrow", "hub"] = "text"
    separator: str | None = None
    """Text between the documents of a file; None: a file is one document."""
    field: str = "text"
    """The field or column that holds the text (JSON lines, Parquet, Arrow, the hub)."""
    ends_lines: bool = False
    """Adds a newline to files that lack it, so that a folder's next file begins a new line."""
    encoding: str = UTF_8
    """Encoding of texts; JSON lines, Parquet, Arrow and the hub are always UTF-8."""
    python: str | None = None
    """Python version of the built-in corpus; None for every other source."""

    @property
    def split(self) -> Literal["named", "tail", "hash"]:
        """Method of holding out text: by file name, the end of the text, or documents by hash."""
        if self.files[0].split is not None:
            return "named"
        return "tail" if self.plain else "hash"

    @property
    def plain(self) -> bool:
        """True for plain texts, False for sets of documents."""
        return self.separator is None and self.format == "text"


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A document, or a part of a long one."""

    text: str | bytes
    """Content: text, or bytes of UTF-8 if the source is read raw."""
    begins: bool
    """True if a document begins with this chunk."""
    split: str | None
    """Split of the text; None: chosen by the document's hash."""


def read_chunks(source: Source, *, raw: bool = False) -> Iterator[TextChunk]:
    """Reads the chunks of a source.

    Args:
        raw: plain texts are read as bytes of UTF-8.
    Raises:
        UserError: a file cannot be read or has the wrong format; the message names the file.
    """
    raw = raw and source.plain
    newline: Any = b"\n" if raw else "\n"
    for file in source.files:
        last = None
        for text in filter(None, _texts(source, file, raw)):
            yield TextChunk(text, last is None or not source.plain, file.split)
            last = text
        if source.plain and source.ends_lines and last and not last.endswith(newline):
            yield TextChunk(newline, False, file.split)


def _texts(source: Source, file: SourceFile, raw: bool) -> Iterator[Any]:
    if source.format == "hub":
        yield from _hub(file, source.field)
    elif source.format in ("parquet", "arrow"):
        yield from _rows(file.path, source.format, source.field)
    else:
        with opened(file.path) as stream:
            if source.format == "jsonl":
                yield from _json_lines(stream, file.path, source.field)
                return
            texts = _decoded(stream, file.path, source.encoding, raw)
            if source.separator is not None:
                texts = _between(texts, source.separator, file.path)
            elif not raw:
                texts = _cut(texts)
            yield from texts


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Opens a file for reading, and decompresses it if its name ends in .gz, .bz2, .xz or .zst.

    Raises:
        UserError: it cannot be read, is not compressed as its name says, or pyarrow is missing.
    """
    unpacked: Any = OPENERS.get(Path(path).suffix.lower(), nullcontext)
    try:
        with open(path, "rb") as raw, unpacked(raw) as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def _zstd(raw: BinaryIO) -> BinaryIO:
    unpacked = _pyarrow().input_stream(raw, compression="zstd")
    return io.BufferedReader(unpacked, CHUNK_BYTES)  # can read a line


OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
"""Functions that decompress a file, by suffix."""


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        how = install_command("data", "pyarrow")
        raise UserError(f"reading Parquet, Arrow and .zst files needs pyarrow: {how}") from error
    return pyarrow


# --- texts ----------------------------------------------------------------------------------------


def _decoded(stream: BinaryIO, path: str, encoding: str, raw: bool) -> Iterator[Any]:
    """Yields a file block by block: its characters, or the bytes of UTF-8 if it is read raw."""
    decoder, block = codecs.getincrementaldecoder(encoding)(), b" "
    while block:
        block = stream.read(CHUNK_BYTES)
        try:
            text = decoder.decode(block, final=not block)
            if text.count("\0") > MOST_NULS * max(len(text), 1000):
                raise UnicodeError("it holds NUL characters")
        except UnicodeError as error:
            raise UserError(
                f"{path} is not {encoding.upper()} ({getattr(error, 'reason', error)}): if it is"
                " text, pass its encoding, such as --encoding utf-16 or cp1252 to fastgpt.prepare"
            ) from error
        yield text if not raw else block if encoding == UTF_8 else text.encode(errors="replace")


def _between(blocks: Iterator[str], separator: str, path: str) -> Iterator[str]:
    """Yields the documents between separators, without the newlines around them."""
    rest = ""
    for block in blocks:
        *documents, rest = (rest + block).split(separator)
        for document in documents:
            yield document.strip("\r\n")
        if len(rest) > MAX_DOCUMENT:
            raise UserError(
                f"{path}: no {separator!r} in {MAX_DOCUMENT:,} characters: is that the right"
                " --separator?"
            )
    yield rest.strip("\r\n")


def _cut(texts: Iterator[str]) -> Iterator[str]:
    """Cuts a text into parts that end where a word does."""
    rest = ""
    for text in texts:
        rest += text
        place = _last_cut(rest)
        if place == 0 and len(rest) >= MAX_CHUNK:
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


def _json_lines(stream: BinaryIO, path: str, field: str) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE), b""), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field] or ""  # null is like an empty field of Parquet
            # halves of surrogate pairs, which JSON can hold but UTF-8 cannot, become `?`
            text = text if text.isascii() else text.encode(errors="replace").decode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} line {number:,}: expected a JSON object with text in the field {field!r},"
                " which --field of fastgpt.prepare chooses, not"
                f" {shown(line.decode(errors='replace'))}"
            ) from error
        yield text


def _rows(path: str, format: str, field: str) -> Iterator[str | None]:
    """Yields the texts of a Parquet or an Arrow file, some rows at a time."""
    arrow = _pyarrow()
    try:
        if format == "parquet":
            # by default a whole row group, possibly the whole file, would be held in memory
            options = {"pre_buffer": False, "buffer_size": 2**20}
            with arrow.parquet.ParquetFile(path, **options) as table:
                _check_column(table.schema_arrow, field, path)
                for batch in table.iter_batches(BATCH_ROWS, columns=[field], use_threads=False):
                    yield from batch.column(0).to_pylist()
            return
        with arrow.memory_map(path) as file:
            for batch in _arrow_batches(arrow, file):
                _check_column(batch.schema, field, path)
                for first in range(0, len(batch), BATCH_ROWS):
                    yield from batch[field].slice(first, BATCH_ROWS).to_pylist()
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _arrow_batches(arrow: Any, file: Any) -> Iterator[Any]:
    """Returns the batches of a file in Arrow's format for streams, as `datasets` writes it, or in
    that for files."""
    try:
        return iter(arrow.ipc.open_stream(file))
    except arrow.ArrowInvalid:
        reader = arrow.ipc.open_file(file)
        return map(reader.get_batch, range(reader.num_record_batches))


@lru_cache(maxsize=1)
def load_splits(source: str) -> dict[str, Any]:
    """Downloads a dataset of the Hugging Face hub with the package `datasets`.

    Args:
        source: `hf:owner/name[/configuration][@revision]`.
    Returns:
        The splits `train` and, if there is one, `val`: memory-mapped `datasets.Dataset`s, or
        streams if the disk has no room for them.
    Raises:
        UserError: the dataset or the network cannot be reached, or the package is missing.
    """
    match = HUB_NAME.fullmatch(source)
    if match is None:
        raise UserError(f"source {source!r}: expected hf:owner/name[/configuration][@revision]")
    try:
        import datasets
        from datasets.config import HF_DATASETS_CACHE

        name: dict[str, Any] = match.groupdict()
        size = datasets.load_dataset_builder(**name).info.size_in_bytes or 0
        cache = Path(HF_DATASETS_CACHE).absolute()
        disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
        fits = size < shutil.disk_usage(disk).free
        found: Any = datasets.load_dataset(**name, streaming=not fits)
    except ImportError as error:
        how = install_command("data", "datasets")
        raise UserError(f"{source} needs the package datasets: {how}") from error
    except Exception as error:  # the package has no base class for network errors
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise UserError(f"cannot load {source} from the Hugging Face hub ({reason})") from error
    if "train" not in found:
        raise UserError(f"{source} has the splits {', '.join(found)}: expected train")
    named = [found[name] for name in ("validation", "valid", "val") if name in found]
    return {"train": found["train"]} | dict(zip(["val"], named))


def _hub(file: SourceFile, field: str) -> Iterator[str | None]:
    rows = load_splits(file.path)[file.split or "train"]
    if rows.features is None:  # of a stream
        rows = rows._resolve_features()
    _check_column(rows.features.arrow_schema, field, file.path)
    for batch in rows.select_columns([field]).iter(BATCH_ROWS):
        yield from batch[field]


def _check_column(schema: Any, field: str, path: str) -> None:
    kinds = {column.name: str(column.type) for column in schema}
    if kinds.get(field) not in ("string", "large_string", "string_view"):
        found = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(
            f"{path} has no column {field!r} of text: pass the one that holds the text to"
            f" fastgpt.prepare with --field (columns: {found})"
        )
