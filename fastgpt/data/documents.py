"""Rows of JSON lines, Parquet, Arrow or a dataset of the hub, read by the package `datasets`.

Files are streamed, so that they need neither memory nor room on the disk. JSON lines are read as
lines and parsed here: the json reader of `datasets` 5.2 fails where another field changes its type
after the first 10 MB, and does not tell the line of an error.
"""

import glob
import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from fastgpt.commands import install_command
from fastgpt.errors import UserError, reason, shown
from fastgpt.files import cache_dir

BATCH_ROWS = 100
"""Number of rows read at a time; a document may be long."""
CHUNK_CHARACTERS = 2**20
"""Number of characters of JSON lines read at a time."""
HUB_NAME = re.compile(r"hf:(?P<path>[\w.-]+/[\w.-]+)(/(?P<name>[\w.-]+))?(@(?P<revision>\S+))?")


def read_rows(path: str, format: str, field: str, split: str | None = None) -> Iterator[str]:
    """Reads the texts of rows, without those that have none.

    Args:
        path: a file, or the name of a dataset of the hub.
        format: `jsonl`, `parquet`, `arrow` or `hub`.
        field: the field or column that holds the text.
        split: `val` for the validation split of the hub.
    Raises:
        UserError: the file cannot be read, or a row has something else; the message names it.
    """
    try:
        rows = load_hub(path)[split or "train"] if format == "hub" else _load(path, format, field)
        for number, value in enumerate(_values(rows, path, field), 1):
            if text := _text(value, format, field, path, number):
                yield text
    except UserError:
        raise
    except Exception as error:  # `datasets` passes on those of each format
        raise UserError(f"cannot read {path}: {reason(error) or type(error).__name__}") from error


def _load(path: str, format: str, field: str) -> Any:
    datasets, file = _datasets(path), {"data_files": glob.escape(path), "split": "train"}
    load = partial(datasets.load_dataset, streaming=True, **file)
    if format == "jsonl":  # as bytes, so that an error is told with its line
        lines = datasets.Features({field: datasets.Value("string")})
        return load("text", encoding="latin-1", chunksize=CHUNK_CHARACTERS, features=lines)
    rows = load(format)
    if format == "arrow" or field not in rows.column_names:
        return rows
    from pyarrow.dataset import ParquetFragmentScanOptions

    scan = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)  # bounds memory
    return load(format, columns=[field], batch_size=BATCH_ROWS, fragment_scan_options=scan)


@lru_cache(maxsize=1)
def load_hub(source: str) -> dict[str, Any]:
    """Downloads a dataset of the hub to where `datasets` keeps them; streams it if it has no room.

    Args:
        source: `hf:owner/name[/configuration][@revision]`.
    Returns:
        The splits `train` and, if there is one, `val`.
    Raises:
        UserError: there is no such dataset or no network, or the package is not installed.
    """
    match = HUB_NAME.fullmatch(source)
    if match is None:
        raise UserError(f"source {source!r}: expected hf:owner/name[/configuration][@revision]")
    datasets, name = _datasets(source), match.groupdict()
    try:
        size = datasets.load_dataset_builder(**name).info.size_in_bytes or 0
        streaming = size > shutil.disk_usage(cache_dir().anchor).free
        found: Any = datasets.load_dataset(**name, streaming=streaming)
    except Exception as error:  # the package has no base class for network errors
        said = " ".join(str(error).split())[:500] or type(error).__name__
        raise UserError(f"cannot load {source} from the Hugging Face hub ({said})") from error
    if "train" not in found:
        raise UserError(f"{source} has the splits {', '.join(found)}: expected train")
    named = [found[name] for name in ("validation", "valid", "val") if name in found]
    return {"train": found["train"]} | dict(zip(["val"], named))


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        how = install_command("data", "datasets")
        raise UserError(f"{what} needs the package datasets: {how}") from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are told once
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _values(rows: Any, path: str, column: str) -> Iterator[Any]:
    if column not in (names := rows.column_names):
        raise UserError(
            f"{path} has no column {column!r} of text: pass the one that holds the text to"
            f" fastgpt.prepare with --field (columns: {', '.join(names)})"
        )
    for batch in rows.select_columns([column]).with_format("arrow").iter(BATCH_ROWS):
        yield from batch.column(0).to_pylist()


def _text(value: Any, format: str, field: str, path: str, number: int) -> str:
    """Returns the text of a row, empty where it is null; a line of JSON is parsed for it."""
    text, expected = value, f"{path} row {number:,}: expected text"
    try:
        if format == "jsonl":
            expected = f"{path} line {number:,}: expected a JSON object with text"
            line = value.encode("latin-1")
            value = line.decode(errors="replace")
            text = json.loads(line)[field] if value.strip() else ""
        # halves of surrogate pairs, which JSON can hold but UTF-8 cannot, become `?`
        return (text or "").encode(errors="replace").decode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{expected} in the field {field!r}, which --field of fastgpt.prepare chooses, not"
            f" {shown(value)}"
        ) from error
