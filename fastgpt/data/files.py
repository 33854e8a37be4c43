"""Files of text on disk: which ones a path means, what is in them, and how they are opened."""

import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, cast

from fastgpt.errors import UserError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
COMPRESSED = (".gz", ".zst")
SPLIT_NAMES = {"train": "train", "valid": "val", "validation": "val", "val": "val"}
CHUNK_BYTES = 2**18
"""What is read of a file at a time."""
SNIFFED_BYTES = 2**20
"""How much of a file tells whether it is text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file, or one split of a data set of the hub."""

    path: str
    """A path; for the hub `hf:owner/name...`."""
    format: Literal["text", "jsonl", "parquet", "hub"]
    split: Literal["train", "val"] | None = None
    """Where it belongs, if its name says so."""


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file for reading, through gzip or Zstandard where its name ends so.

    Yields:
        The stream of its content, and the file itself, whose position tells how far it has come.

    Raises:
        UserError: it cannot be read, is not what its name says, or the package that reads
            Zstandard is missing.
    """
    try:
        with open(path, "rb") as raw:
            if path.endswith(".gz"):
                with gzip.open(raw, "rb") as stream:
                    yield cast(BinaryIO, stream), raw
            elif path.endswith(".zst"):
                unpacked = pyarrow().input_stream(raw, compression="zstd")
                with io.BufferedReader(unpacked, CHUNK_BYTES) as stream:  # it knows lines
                    yield stream, raw
            else:
                yield raw, raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from error


def pyarrow():
    """The package, which only Parquet and Zstandard need.

    Raises:
        UserError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "reading Parquet and .zst files needs pyarrow: pip install -c constraints.txt '.[data]'"
        ) from error
    return pyarrow


def named_files(name: str) -> list[File]:
    """The file of that path, or those that match it as a pattern (`*`, `?`, `**`), sorted; none is
    an empty list."""
    path = str(Path(name).expanduser())
    if os.path.isfile(path):
        paths = [path]
    else:
        paths = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    return _with_splits([File(path=path, format=_format(path)) for path in paths])


def folder_files(root: Path) -> tuple[list[File], int]:
    """The files of documents (JSON lines, Parquet) below a folder if it has any, else its texts.

    Returns:
        Those that are not empty, sorted by POSIX path, and how many others were passed over:
        hidden, binary, not UTF-8, or of the other kind.
    """
    paths = _below(root)
    visible = [p for p in paths if not p.relative_to(root).name.startswith(".")]
    # .json: a project's settings lie in folders of text, and are no lines of documents
    documents = [p for p in visible if _kind(str(p)) in (".jsonl", ".ndjson", ".parquet")]
    kept = documents or [p for p in visible if _is_text(str(p))]
    files = [
        File(path=str(path), format=_format(str(path)) if documents else "text")
        for path in kept
        if path.stat().st_size
    ]
    return _with_splits(files), len(paths) - len(kept)


def _below(root: Path) -> list[Path]:
    """Every regular file below `root`, sorted by POSIX path; hidden folders are not entered."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [path for path in (Path(folder, name) for name in files) if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _kind(path: str) -> str:
    """The suffix that says what is in a file, compressed or not."""
    for suffix in COMPRESSED:
        path = path.removesuffix(suffix)
    return os.path.splitext(path)[1].lower()


def _format(path: str) -> Literal["text", "jsonl", "parquet"]:
    return FORMATS.get(_kind(path), "text")  # type: ignore[return-value]


def _with_splits(files: Sequence[File]) -> list[File]:
    """`files` with the splits that their names say, if every one says one and both are there."""
    splits = [_split_of(os.path.basename(file.path).lower()) for file in files]
    if set(splits) != {"train", "val"}:
        return list(files)
    return [replace(file, split=split) for file, split in zip(files, splits)]


def _split_of(name: str) -> Literal["train", "val"] | None:
    words = {SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", name) if word in SPLIT_NAMES}
    return words.pop() if len(words) == 1 else None  # type: ignore[return-value]


def _is_text(path: str) -> bool:
    """Whether a file, unpacked, begins as UTF-8 text does."""
    try:
        with opened(path) as (stream, _):
            data = stream.read(SNIFFED_BYTES)
    except UserError:
        if path.endswith(COMPRESSED):
            return False  # its name says compressed, its content does not
        raise
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return len(data) == SNIFFED_BYTES and error.start > len(data) - 4  # a character cut in two
    return True
