"""Lists the files of a path, a folder or a pattern, with their formats and splits."""

import glob
import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fastgpt.data.reading import File, decoded, opened
from fastgpt.errors import UserError, counted

DOCUMENTS: dict[str, Literal["jsonl", "parquet"]] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
}  # fmt: skip
"""Formats of documents, by suffix; all other files are texts."""
COMPRESSED = (".gz", ".zst")
ABOUT = re.compile(r"(readme|licen[sc]e|notice|citation)\b.*|[^.]+|.*\.(json|ya?ml)", re.I)
"""Names of texts about a data set, which are left out beside its documents."""
SPLIT_NAMES = {"train": "train", "valid": "val", "validation": "val", "val": "val", "test": "test"}
CHECKED_BLOCKS = 4
"""Number of blocks at the beginning of a file that are checked to be text."""


def list_files(given: str, encoding: str) -> tuple[list[File], list[str]]:
    """Lists the JSON lines and Parquet files of a path or pattern; if it has none, its text files.

    Args:
        given: a path, or a pattern with `*`, `?` or `**`.
        encoding: encoding of texts.
    Returns:
        The files that are not empty (possibly none), sorted by path, and the reasons why others
        were skipped: hidden, not text, about the documents (`ABOUT`), or named as a test split.
    Raises:
        UserError: the one file is not text; there are texts beside documents; or documents of which
            some are named as train or validation and some are not.
    """
    root = Path(given).expanduser()
    if root.is_file():
        file = _file(str(root))
        if file.format == "text" and (reason := _not_text(file.path, encoding)):
            raise UserError(reason)
        return [file] * (os.path.getsize(file.path) > 0), []
    found = _below(root) if root.is_dir() else sorted(glob.glob(str(root), recursive=True))
    paths = [path for path in found if os.path.isfile(path)]
    hidden = [path for path in paths if root.is_dir() and Path(path).name.startswith(".")]
    reasons = {path: f"{path} is hidden" for path in hidden}
    visible = [path for path in paths if path not in reasons and os.path.getsize(path)]
    documents = [path for path in visible if _file(path).format != "text"]
    if len(documents) < len(visible):  # beside other files, .json files are settings
        documents = [path for path in documents if _suffix(path) != ".json"]
    taken = set(documents)
    others = [path for path in visible if path not in taken]
    no_texts = {path: reason for path in others if (reason := _not_text(path, encoding))}
    if documents:
        _check_one_kind(given, [path for path in others if path not in no_texts], documents)
        reasons |= {p: f"{p} is not JSON lines or Parquet, as other files are" for p in others}
        files = [_file(path) for path in documents]
    else:
        reasons |= no_texts
        files = [File(path=path, format="text") for path in others if path not in no_texts]
    files, left_out = _with_splits(files)
    return files, [*reasons.values(), *left_out]


def _check_one_kind(given: str, texts: list[str], documents: list[str]) -> None:
    """Raises `UserError` if texts worth training on are beside documents."""
    texts = [path for path in texts if not ABOUT.fullmatch(Path(path).name)]
    if texts:
        folder = os.path.commonpath([os.path.dirname(path) for path in (*texts, *documents)])
        kinds = (f"'{folder}/**/*{_suffix(min(paths))}*'" for paths in (texts, documents))
        raise UserError(
            f"{given} holds {counted(len(texts), 'text')} and {counted(len(documents), 'file')} of"
            f" JSON lines or Parquet: choose one kind by a pattern, such as {' or '.join(kinds)}"
        )


def _file(path: str) -> File:
    return File(path=path, format=DOCUMENTS.get(_suffix(path), "text"))


def _suffix(path: str) -> str:
    """Returns the suffix of a file name, without .gz or .zst."""
    path = path.lower()
    for suffix in COMPRESSED:
        path = path.removesuffix(suffix)
    return os.path.splitext(path)[1]


def _below(root: Path) -> list[str]:
    """Lists the files below `root`, except in hidden folders, sorted by POSIX path."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in files]
    return [str(path) for path in sorted(found, key=Path.as_posix)]


def _not_text(path: str, encoding: str) -> str | None:
    """Returns the reason why the beginning of a file, decompressed, is not text; None if it is."""
    try:
        with opened(path) as (stream, _):
            for _ in itertools.islice(decoded(stream, path, encoding), CHECKED_BLOCKS):
                pass
    except UserError as error:
        if isinstance(error.__cause__, OSError) and not path.lower().endswith(COMPRESSED):
            raise  # it cannot be read at all
        return str(error)
    return None


def _with_splits(files: list[File]) -> tuple[list[File], list[str]]:
    """Adds the splits named in the paths to `files`, if train and validation are both among them;
    returns the files, and the reasons why test files were left out."""
    folder = os.path.commonpath([os.path.dirname(file.path) for file in files]) if files else ""
    splits = [_split_of(os.path.relpath(file.path, folder or ".").lower()) for file in files]
    if not {"train", "val"} <= set(splits):
        return files, []
    if None in splits:
        if files[0].format == "text":
            return files, []  # a project's sources: train.py beside val.py
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
