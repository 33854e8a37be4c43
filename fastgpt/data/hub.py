"""Data sets of the Hugging Face hub, through the `datasets` package, which downloads them (with
resuming and verification) and keeps them in its own cache.
"""

import re
from functools import lru_cache
from typing import Any

from fastgpt.errors import UserError

NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(/(?P<configuration>[\w.-]+))?(@(?P<revision>\S+))?"
)
VALIDATION = ("validation", "valid", "val")


@lru_cache(maxsize=1)
def load_splits(source: str) -> dict[str, Any]:
    """Downloads a data set, and returns its splits `train` and, if it has one, `val`.

    Args:
        source: `hf:owner/name[/configuration][@revision]`.
    Returns:
        Memory-mapped `datasets.Dataset`s.
    Raises:
        UserError: there is no such data set or no network, or the package is not installed.
    """
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
        found: Any = datasets.load_dataset(
            match["repo"],
            match["configuration"],
            revision=match["revision"],
            download_config=datasets.DownloadConfig(max_retries=5),
        )
    except Exception as error:  # the package has no base class for network errors
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise UserError(f"cannot load {source} from the Hugging Face hub ({reason})") from error
    if "train" not in found:
        raise UserError(f"{source} has the splits {', '.join(found)}: expected train")
    validation = [found[name] for name in VALIDATION if name in found]
    return {"train": found["train"], **({"val": validation[0]} if validation else {})}


def revision_of(split: Any) -> str | None:
    """Returns the commit in the addresses that a split was downloaded from, if they tell it."""
    found = re.search(r"@([0-9a-f]{40})/", " ".join(split.info.download_checksums or ()))
    return found[1] if found else None
