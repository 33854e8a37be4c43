"""Data sets of the Hugging Face hub, through the `datasets` package, which downloads them (with
resuming and verification) and keeps them in its own cache.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastgpt.data.prepare.files import File
from fastgpt.errors import UserError

NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(/(?P<configuration>[\w.-]+))?(@(?P<revision>\S+))?"
)
VALIDATION = ("validation", "valid", "val")


def hub_files(source: str, instead: Path) -> tuple[tuple[File, ...], str | None]:
    """Downloads a data set, and returns its splits and its commit, if that is known.

    Args:
        source: `hf:owner/name[/configuration][@revision]`.
        instead: folder for files downloaded by hand, for the error message.

    Raises:
        UserError: there is no such data set or no network, or the package is not installed.
    """
    try:
        found = _load(source)
    except UserError as error:
        raise UserError(
            f"{error}; or get its files another way (Parquet, .jsonl or .txt), put them into"
            f" {instead} and use that folder"
        ) from error
    validation = any(name in found for name in VALIDATION)
    if "train" not in found:
        raise UserError(f"{source} has the splits {', '.join(found)}: expected train")
    splits = ("train", "val") if validation else (None,)
    files = tuple(File(path=source, format="hub", split=split) for split in splits)
    return files, _revision(found["train"])


def open_split(file: File) -> Any:
    """Opens a split as a `datasets.Dataset`, memory-mapped."""
    found = _load(file.path)
    names = VALIDATION if file.split == "val" else ("train",)
    return next(found[name] for name in names if name in found)


@lru_cache(maxsize=1)
def _load(source: str) -> Any:
    match = NAME.fullmatch(source)
    if match is None:
        raise UserError(f"source {source!r}: expected hf:owner/name[/configuration][@revision]")
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{source} needs the datasets package: pip install -c constraints.txt '.[data]'"
        ) from error
    try:
        return datasets.load_dataset(
            match["repo"],
            match["configuration"],
            revision=match["revision"],
            download_config=datasets.DownloadConfig(max_retries=5),
        )
    except Exception as error:  # the package has no base class for network errors
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise UserError(f"cannot load {source} from the Hugging Face hub ({reason})") from error


def _revision(split: Any) -> str | None:
    """Returns the commit in the addresses that a split was downloaded from."""
    sources = " ".join(split.info.download_checksums or ())
    found = re.search(r"@([0-9a-f]{40})/", sources)
    return found[1] if found else None
