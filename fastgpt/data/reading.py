"""Reads a source chunk by chunk, in order and in bounded memory.

A chunk is a document, or a part of a plain text. These are cut before a space between two letters,
or if there is none before white space after another character. GPT-2's BPE then gives the parts the
tokens of the whole, and so do the patterns of later GPTs at the first kind of place; a tokenizer
that prepends a mark to each text (Metaspace) adds one to each part.
"""

import codecs
from collections.abc import Iterator
from typing import Any

from fsspec.compression import register_compression
from fsspec.implementations.local import LocalFileSystem

from fastgpt.commands import install_command
from fastgpt.data.documents import read_rows
from fastgpt.data.sources import UTF_8, Source, SourceFile, TextChunk
from fastgpt.errors import UserError, reason

CHUNK_BYTES = 2**18
"""Number of bytes read from a file at a time."""
MAX_CHUNK = 2**24
"""Number of characters after which a text without white space is cut anywhere."""
MAX_DOCUMENT = 2**26
"""Number of characters without a separator that is an error: the separator seems to be wrong."""
WORD_ENDS = " \n\r\t"
MOST_NULS = 0.01
"""The largest share of NUL characters in a text; UTF-16 that is read as UTF-8 has a half."""


def read_chunks(source: Source, *, raw: bool = False) -> Iterator[TextChunk]:
    """Reads the chunks of a source: documents, or parts of plain texts, whose files are documents.

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
    if source.format != "text":
        return read_rows(file.path, source.format, source.field, file.split)
    blocks = _decoded(file.path, source.encoding, raw)
    if source.separator is not None:
        return _between(blocks, source.separator, file.path)
    return blocks if raw else _cut(blocks)


def _decoded(path: str, encoding: str, raw: bool) -> Iterator[Any]:
    """Yields a file block by block: its characters, or the bytes of UTF-8 if it is read raw."""
    decoder = codecs.getincrementaldecoder(encoding)()
    for block in read_blocks(path):
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


def read_blocks(path: str) -> Iterator[bytes]:
    """Yields the content of a file, unpacked if its name says it is packed, and b"" at last.

    Raises:
        UserError: it cannot be read, is not packed as its name says, or pyarrow is missing.
    """
    try:
        opened: Any = LocalFileSystem().open(path, "rb", compression="infer")
        with opened as file:
            while block := file.read(CHUNK_BYTES):
                yield block
    except ImportError as error:
        how = install_command("data", "pyarrow")
        raise UserError(f"reading .zst files needs pyarrow: {how}") from error
    except Exception as error:  # each kind of compression has errors of its own
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    yield b""


def _zstd(file: Any, mode: str) -> Any:
    """Opens a .zst file; fsspec's own way stops, without a word, at its first frame."""
    import pyarrow

    return pyarrow.input_stream(file, compression="zstd")


register_compression("zstd", _zstd, "zst", force=True)


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
