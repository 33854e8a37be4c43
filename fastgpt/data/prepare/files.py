"""Files of text on disk: which ones a path means, what is in them, and how they are opened."""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, cast

from fastgpt.data.shards import FORMATS as SHARD_MAGICS
from fastgpt.errors import UserError

Format = Literal["text", "jsonl", "parquet"]
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
COMPRESSED = (".gz", ".zst")
SPLIT_NAMES = {"train": "train", "valid": "val", "validation": "val", "val": "val", "test": "test"}
OTHER_ARCHIVES = (".bz2", ".xz", ".zip", ".tar", ".tgz", ".7z", ".npy", ".npz", ".pt")
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
            if path.lower().endswith(".gz"):
                with gzip.open(raw, "rb") as stream:
                    yield cast(BinaryIO, stream), raw
            elif path.lower().endswith(".zst"):
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


def named_files(name: str) -> tuple[list[File], int]:
    """The file of that path, or those that match it as a pattern (`*`, `?`, `**`), sorted.

    Returns:
        The files (none is an empty list), and how many of a pattern's were passed over.

    Raises:
        UserError: it holds no text that is known here, or texts and documents at once.
    """
    path = str(Path(name).expanduser())
    if os.path.isfile(path):
        _refuse(path)
        return [File(path=path, format=_format(path))], 0
    paths = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    for found in paths:
        _refuse(found)
    kept = [p for p in paths if os.path.getsize(p) and (_format(p) != "text" or _is_text(p))]
    files = [File(path=p, format=_format(p)) for p in kept]
    formats = {file.format == "text" for file in files}
    if len(formats) > 1:
        raise UserError(f"{name!r} matches both texts and documents: expected one kind")
    files, left_out = _with_splits(files)
    return files, len(paths) - len(kept) + left_out


def folder_files(root: Path) -> tuple[list[File], int]:
    """The files of documents (JSON lines, Parquet) below a folder if it has any, else its texts.

    Returns:
        Those that are not empty, sorted by POSIX path, and how many others were passed over:
        hidden, binary, not UTF-8, of the other kind, or named as a test split.

    Raises:
        UserError: documents of which some are named as train or validation and some are not.
    """
    paths = _below(root)
    visible = [str(p) for p in paths if not p.relative_to(root).name.startswith(".")]
    documents = [p for p in visible if _format(p) != "text" and _kind(p) != ".json"]
    if not documents and all(map(_is_json_lines, visible)):
        documents = visible  # as C4 comes; among other files .json is a project's settings
    kept = documents or [p for p in visible if _is_text(p)]
    files = [
        File(path=path, format=_format(path) if documents else "text")
        for path in kept
        if os.path.getsize(path)
    ]
    files, left_out = _with_splits(files)
    return files, len(paths) - len(kept) + left_out


def _refuse(path: str) -> None:
    """Raises `UserError` for what nobody means as text."""
    if path.lower().endswith(OTHER_ARCHIVES):
        raise UserError(f"{path}: expected text, .jsonl or .parquet, as it is or as .gz or .zst")
    with open(path, "rb") as file:
        if int.from_bytes(file.read(4), "little") in SHARD_MAGICS:
            raise UserError(f"{path} is a token shard: give the folder that it is in")


def _is_json_lines(path: str) -> bool:
    """Whether a file is named .json and begins with an object in one line."""
    if _kind(path) != ".json":
        return False
    try:
        with opened(path) as (stream, _):
            return isinstance(json.loads(stream.readline(SNIFFED_BYTES)), dict)
    except (UserError, ValueError, RecursionError):
        return False


def _below(root: Path) -> list[Path]:
    """Every regular file below `root`, sorted by POSIX path; hidden folders are not entered."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [path for path in (Path(folder, name) for name in files) if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _kind(path: str) -> str:
    """The suffix that says what is in a file, compressed or not."""
    path = path.lower()
    for suffix in COMPRESSED:
        path = path.removesuffix(suffix)
    return os.path.splitext(path)[1]


def _format(path: str) -> Format:
    return FORMATS.get(_kind(path), "text")


def _with_splits(files: Sequence[File]) -> tuple[list[File], int]:
    """`files` with the splits that their paths say, if train and validation are both among them;
    and how many were left out, since they are for testing."""
    folder = os.path.commonpath([os.path.dirname(file.path) for file in files]) if files else ""
    splits = [_split_of(os.path.relpath(file.path, folder or ".").lower()) for file in files]
    if not {"train", "val"} <= set(splits):
        return list(files), 0
    if None in splits:
        if files[0].format == "text":
            return list(files), 0  # a project's sources: train.py beside val.py
        unnamed = files[splits.index(None)].path
        raise UserError(
            f"{unnamed} is named neither train nor validation, as other files are: give them apart"
        )
    named = [replace(file, split=split) for file, split in zip(files, splits) if split != "test"]
    return named, len(files) - len(named)


def _split_of(path: str) -> str | None:
    """What the name says, or else the nearest folder."""
    for part in reversed(path.split(os.sep)):
        words = {SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", part) if word in SPLIT_NAMES}
        if words:
            return words.pop() if len(words) == 1 else None
    return None


def _is_text(path: str) -> bool:
    """Whether a file, unpacked, begins as UTF-8 text does."""
    try:
        with opened(path) as (stream, _):
            data = stream.read(SNIFFED_BYTES)
    except UserError:
        if path.lower().endswith(COMPRESSED):
            return False  # its name says compressed, its content does not
        raise
    if b"\0" in data:
        return False
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return len(data) == SNIFFED_BYTES and error.start > len(data) - 4  # a character cut in two
    return True
