"""Finds and opens text files on disk, and detects their formats and splits."""

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, cast

from fastgpt.data.prepare.text import UTF_8, TextDecoder, check_format
from fastgpt.data.shards import FORMATS as SHARD_MAGICS
from fastgpt.errors import UserError, counted

Format = Literal["text", "jsonl", "parquet"]
ABOUT = re.compile(r"(readme|licen[sc]e|notice|citation)\b.*|[^.]+|.*\.(json|ya?ml)", re.I)
"""Names of texts about a data set, which are left out beside its documents."""
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
"""Number of bytes read from a file at a time."""
SNIFFED_BYTES = 2**20
"""Number of bytes at the beginning of a file that are checked to be text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of text, or a split of a data set of the hub."""

    path: str
    """Local path of the file, or `hf:owner/name/path` on the Hugging Face hub."""
    format: Literal["text", "jsonl", "parquet", "hub"]
    split: Literal["train", "val"] | None = None
    """Split that it belongs to, if its name says so."""


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
        with open(path, "rb") as raw:
            if path.lower().endswith(".gz"):
                with gzip.open(raw, "rb") as stream:
                    yield cast(BinaryIO, stream), raw
            elif path.lower().endswith(".zst"):
                unpacked = pyarrow().input_stream(raw, compression="zstd")
                with io.BufferedReader(unpacked, CHUNK_BYTES) as stream:  # can iterate over lines
                    yield stream, raw
            else:
                yield raw, raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from error


def pyarrow():
    """Imports the package pyarrow, which only Parquet and Zstandard files need.

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


def named_files(name: str, encoding: str = UTF_8) -> tuple[list[File], list[str]]:
    """Finds the file at a path, or the files that match a pattern (`*`, `?`, `**`), sorted.

    Returns:
        The files (possibly none), and the reasons why others that match were skipped.

    Raises:
        UserError: the one file is not text, or a pattern matches texts and documents at once.
    """
    path = str(Path(name).expanduser())
    if os.path.isfile(path):
        _refuse(path)
        file = File(path=path, format=_format(path))
        if file.format == "text" and (reason := _not_text(path, encoding)):
            raise UserError(reason)
        return [file], []
    paths = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    for found in paths:
        _refuse(found)
    reasons = {p: f"{p} is empty" for p in paths if not os.path.getsize(p)}
    reasons |= _not_texts((p for p in paths if _format(p) == "text"), encoding)
    files = [File(path=p, format=_format(p)) for p in paths if p not in reasons]
    formats = {file.format == "text" for file in files}
    if len(formats) > 1:
        raise UserError(f"{name!r} matches both text and .jsonl or .parquet: expected one kind")
    files, left_out = _with_splits(files)
    return files, [*reasons.values(), *left_out]


def folder_files(root: Path, encoding: str = UTF_8) -> tuple[list[File], list[str]]:
    """Finds the documents (JSON lines, Parquet) below a folder if it has any, else its texts.

    Returns:
        The files that are not empty, sorted by POSIX path, and the reasons why others were skipped:
        hidden, not text, about the documents (`ABOUT`), or named as a test split.

    Raises:
        UserError: there are texts beside documents; or documents of which some are named as train
            or validation and some are not.
    """
    paths = _below(root)
    reasons = {str(p): f"{p} is hidden" for p in paths if p.name.startswith(".")}
    visible = [str(p) for p in paths if str(p) not in reasons]
    documents = {p for p in visible if _format(p) != "text" and _kind(p) != ".json"}
    if not documents and all(map(_is_json_lines, visible)):
        documents = set(visible)  # as in C4; beside other files, .json files are settings
    if documents:
        others = [p for p in visible if p not in documents]
        _check_one_kind(root, others, documents, encoding)
        reasons |= {p: f"{p} is not JSON lines or Parquet, as other files are" for p in others}
    else:
        reasons |= _not_texts(visible, encoding)
    files = [
        File(path=path, format=_format(path) if documents else "text")
        for path in visible
        if path not in reasons and os.path.getsize(path)
    ]
    files, left_out = _with_splits(files)
    return files, [*reasons.values(), *left_out]


def _check_one_kind(root: Path, others: list[str], documents: set[str], encoding: str) -> None:
    """Raises `UserError` if texts worth training on are beside documents."""
    texts = {p for p in others if not ABOUT.fullmatch(Path(p).name) and os.path.getsize(p)}
    if texts := texts - _not_texts(texts, encoding).keys():
        kinds = (f"'{root}/**/*{_kind(min(paths))}*'" for paths in (texts, documents))
        number = f"{counted(len(texts), 'text')} and {counted(len(documents), 'file')}"
        raise UserError(
            f"{root} holds {number} of JSON lines or Parquet: choose one kind by a pattern, such as"
            f" {' or '.join(kinds)}"
        )


def _refuse(path: str) -> None:
    """Raises `UserError` for archives, arrays and token shards."""
    if path.lower().endswith(OTHER_ARCHIVES):
        raise UserError(f"{path}: expected text, .jsonl or .parquet, plain or as .gz or .zst")
    with open(path, "rb") as file:
        if int.from_bytes(file.read(4), "little") in SHARD_MAGICS:
            raise UserError(f"{path} is a token shard: use the folder that it is in")


def _is_json_lines(path: str) -> bool:
    """Returns True for a .json file whose first line is a whole JSON object."""
    if _kind(path) != ".json":
        return False
    try:
        with opened(path) as (stream, _):
            return isinstance(json.loads(stream.readline(SNIFFED_BYTES)), dict)
    except (UserError, ValueError, RecursionError):
        return False


def _below(root: Path) -> list[Path]:
    """Lists the regular files below `root`, except in hidden folders, sorted by POSIX path."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [path for path in (Path(folder, name) for name in files) if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _kind(path: str) -> str:
    """Returns the suffix of a file name, without .gz or .zst."""
    path = path.lower()
    for suffix in COMPRESSED:
        path = path.removesuffix(suffix)
    return os.path.splitext(path)[1]


def _format(path: str) -> Format:
    return FORMATS.get(_kind(path), "text")


def _with_splits(files: Sequence[File]) -> tuple[list[File], list[str]]:
    """Adds the splits named in the paths to `files`, if train and validation are both among them;
    returns the files, and the reasons why test files were left out."""
    folder = os.path.commonpath([os.path.dirname(file.path) for file in files]) if files else ""
    splits = [_split_of(os.path.relpath(file.path, folder or ".").lower()) for file in files]
    if not {"train", "val"} <= set(splits):
        return list(files), []
    if None in splits:
        if files[0].format == "text":
            return list(files), []  # a project's sources: train.py beside val.py
        unnamed = files[splits.index(None)].path
        raise UserError(
            f"{unnamed} is named neither train nor validation, unlike others: prepare it separately"
        )
    named = [replace(file, split=split) for file, split in zip(files, splits) if split != "test"]
    tests = [file.path for file, split in zip(files, splits) if split == "test"]
    return named, [f"{path} is named as a test split" for path in tests]


def _split_of(path: str) -> str | None:
    """Returns the split named by the file, or else by the nearest folder."""
    for part in reversed(path.split(os.sep)):
        words = {SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", part) if word in SPLIT_NAMES}
        if words:
            return words.pop() if len(words) == 1 else None
    return None


def _not_texts(paths: Iterable[str], encoding: str) -> dict[str, str]:
    """Returns the files that are not text, with the reasons."""
    return {path: reason for path in paths if (reason := _not_text(path, encoding))}


def _not_text(path: str, encoding: str) -> str | None:
    """Returns the reason why the beginning of a file, decompressed, is not text; None if it is."""
    try:
        with opened(path) as (stream, _):
            head = stream.read(SNIFFED_BYTES)
    except UserError as error:
        if path.lower().endswith(COMPRESSED):
            return str(error)  # named as compressed, but it is not
        raise
    try:
        check_format(path, head)
        TextDecoder(path, encoding).decode(head, final=len(head) < SNIFFED_BYTES)
    except UserError as error:
        return str(error)
    return None
