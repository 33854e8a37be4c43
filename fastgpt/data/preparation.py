"""Prepares text for training: tokenizes it once, atomically, with one process at a time.

A prepared directory holds token shards, their tokenizer and a manifest. It is written beside its
place, in `NAME.incomplete`, and renamed when it is complete.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import FileLock, Timeout

from fastgpt.data.corpus import MANIFEST, Corpus, open_shards, read_prepared
from fastgpt.data.reading import UTF_8, Source
from fastgpt.data.request import PROGRESS, Request, Settings, check_same, load_progress
from fastgpt.data.sources import HUB, HUB_PREFIX, find_source
from fastgpt.data.tokenizers import check_kind, make_tokenizer
from fastgpt.data.verify import check_once
from fastgpt.data.writing import Report, write_directory
from fastgpt.errors import UserError, counted, writing
from fastgpt.files import cache_dir, sync_directory

TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst")
PATIENCE_S = 2
"""Seconds of waiting for another process before a message says so."""

logger = logging.getLogger(__name__)


def open_corpus(
    source: str,
    *,
    tokenizer: str,
    val_fraction: float,
    encoding: str = UTF_8,
    documents: str = "gpt2",
    report: Report | None = None,
) -> Corpus:
    """Opens a corpus, which is prepared in the cache the first time.

    Args:
        source: a name, a path or a data set of the hub (see `find_source`), a prepared directory,
            or a folder of token shards that llm.c or modded-nanogpt wrote.
        tokenizer: a kind, the path of a `tokenizer.json`, or `auto`: the one saved with shards,
            else GPT-2's for shards; characters for shakespeare, `documents` for sets of documents,
            bytes for other text.
        val_fraction: in (0, 1), fraction held out for validation; data that is split already keeps
            its split.
        encoding: encoding of text files, by Python's name.
        documents: tokenizer of sets of documents, if `tokenizer` is `auto`.
        report: see `write_directory`; with it, files that are skipped are warned of every time.
    Raises:
        UserError: there is nothing to read, it cannot be split or tokenized as asked, or a shard is
            damaged or holds an id that the tokenizer does not have.
    """
    path = Path(source).expanduser()
    if tokenizer != "auto":
        check_kind(tokenizer, None)
    if (path / MANIFEST).is_file() or (path.is_dir() and any(path.glob("*train*.bin"))):
        if encoding != UTF_8:
            raise UserError(f"encoding {encoding} is for text files only: {path} holds tokens")
        return open_shards(path, tokenizer=tokenizer)
    found = find_source(source, encoding=encoding)
    if report is not None:
        _warn_of_files(found)
    tokenizer = documents if tokenizer == "auto" and not found.plain else tokenizer
    request = Request.of(found, Settings(tokenizer=tokenizer, val_fraction=val_fraction))
    key = hashlib.sha256(json.dumps(request.facts()).encode()).hexdigest()[:16]
    entry = cache_dir() / "corpora" / f"{request.source.name}-{key}"
    with writing(entry), _locked(entry):
        if entry.exists():
            try:
                corpus = read_prepared(entry)
                check_once(corpus.shards(), corpus.tokenizer.vocab_size)
                return corpus
            except (UserError, OSError) as error:
                logger.warning("preparing the cached corpus again: %s", error)
        shutil.rmtree(entry, ignore_errors=True)
        _prepare_whole(request, entry, report=report)
    return read_prepared(entry)


def prepare(
    source: str,
    out: Path,
    *,
    workers: int | None = None,
    report: Report | None = None,
    save_every_s: float = 5.0,
    **settings: Any,
) -> Path:
    """Writes a prepared directory to `out`, or resumes an interrupted one; returns its path.

    The same call for a directory that is complete does nothing.

    Args:
        source: as for `open_corpus`, but not token shards.
        out: created, or filled if it is empty, only when everything has been written.
        workers: see `write_directory`, as `report` and `save_every_s`.
        settings: fields of `Settings`.
    Raises:
        UserError: as for `open_corpus`, or `out` is not empty, or another process is writing it.
    """
    out, asked = Path(out).expanduser().resolve(), Settings(**settings)
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}: expected 1 or more")
    if asked.tokenizer != "auto":
        check_kind(asked.tokenizer, asked.vocab_size)
    if not (complete := (out / PROGRESS).is_file()):
        _check_place(out)
    if (Path(source).expanduser() / MANIFEST).is_file():
        raise UserError(f"{source} is already a prepared directory: it has a {MANIFEST}")
    of_hub = source in HUB or source.startswith(HUB_PREFIX)
    if asked.tokenizer == "gpt2" or (asked.tokenizer == "auto" and of_hub):
        make_tokenizer("gpt2", None)  # fails before a long download if its files are missing
    found = find_source(
        source, separator=asked.separator, field=asked.field, encoding=asked.encoding
    )
    request = Request.of(found, asked)
    with writing(out), _locked(out, wait=False):
        if complete:
            check_same(out, load_progress(out)[0], request.facts())
            logger.warning("%s is complete already: nothing is left to do", out)
        else:
            _warn_of_files(found)
            _prepare_whole(request, out, workers=workers, report=report, save_every_s=save_every_s)
    return out


def _check_place(out: Path) -> None:
    """Raises `UserError` unless a directory can be written at `out`, and renamed."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory: use another one or remove it")
    if out.is_mount():
        raise UserError(f"{out} is a mount point: use a folder inside it")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out.parent).close()


def _prepare_whole(request: Request, out: Path, **options: Any) -> None:
    """Writes a directory beside `out`, or resumes an interrupted one, and renames it to `out`."""
    unfinished = out.with_name(f"{out.name}.incomplete")
    write_directory(request, unfinished, **options)
    os.replace(unfinished, out)
    sync_directory(out.parent)


def _warn_of_files(source: Source) -> None:
    """Warns about files that are skipped, and about tables that are read as plain text."""
    if source.skipped:
        logger.warning(
            "%s: %s read, %d skipped, the first because %s",
            source.name, counted(len(source.files), "file"), len(source.skipped), source.skipped[0],
        )  # fmt: skip
    tables = [file.path for file in source.files if file.path.lower().endswith(TABLES)]
    if tables:
        logger.warning(
            "%s is read as plain text, with its commas and quotes; to train on the text of one"
            " column, convert it to JSON lines", tables[0],
        )  # fmt: skip


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of `path`, which the system releases when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=PATIENCE_S if wait else 0)
    except Timeout as error:
        if not wait:
            raise UserError(f"another process is preparing {path}: wait until it ends") from error
        logger.warning("waiting for another process, which is preparing %s", path.name)
        lock.acquire()
    with lock:  # released at the second exit
        yield
