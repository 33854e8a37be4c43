"""Prepares text for training: tokenizes it once, atomically, with one process at a time.

Words
    source              files of text, given by a name or a path, and how to read them
    request             a source and settings, which decide every byte of the result
    prepare             to carry out a request: `prepare` in a given directory, `open_corpus` in
                        the cache
    prepared directory  the result: token shards, their tokenizer and a manifest
    progress            request and how far it has come, kept in its directory

A directory is written beside its place, in `NAME.incomplete`, and renamed when it is complete.
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
from fastgpt.data.prepare import sources
from fastgpt.data.prepare.request import (
    PROGRESS,
    SHARD_TOKENS,
    Request,
    check_settings,
    load_progress,
)
from fastgpt.data.prepare.sources import HUB, HUB_PREFIX, Source, find_source
from fastgpt.data.prepare.text import UTF_8
from fastgpt.data.prepare.write import Report, write_directory
from fastgpt.data.tokenizers import check_kind, make_tokenizer
from fastgpt.data.verify import check_once
from fastgpt.errors import UserError, counted, writing
from fastgpt.files import cache_dir, data_dir, sync_directory

TAIL_FRACTION, DOCUMENT_FRACTION = 0.1, 0.005
"""Default fractions held out of a text, and of a set of documents."""
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
    if source == "shakespeare" and (cached := _shakespeare_tokens(tokenizer, val_fraction)):
        return cached
    found = find_source(source, encoding=encoding)
    if report is not None:
        _warn_of_files(found)
    tokenizer = documents if tokenizer == "auto" and not found.plain else tokenizer
    request = _request(found, tokenizer=tokenizer, val_fraction=val_fraction)
    key = hashlib.sha256(json.dumps(request.facts()).encode()).hexdigest()[:16]
    entry = cache_dir() / "corpora" / f"{request.source.name}-{key}"
    with writing(entry), _locked(entry):
        if (cached := _read_if_whole(entry)) is not None:
            return cached
        shutil.rmtree(entry, ignore_errors=True)
        _prepare_whole(request, entry, report=report)
    return read_prepared(entry)


def prepare(
    source: str,
    out: Path,
    *,
    tokenizer: str = "auto",
    vocab_size: int | None = None,
    val_fraction: float | None = None,
    separator: str | None = None,
    field: str = "text",
    encoding: str = UTF_8,
    shard_tokens: int = SHARD_TOKENS,
    **options: Any,
) -> Path:
    """Writes a prepared directory to `out`, or resumes an interrupted one; returns its path.

    The same call for a directory that is complete does nothing.

    Args:
        source: as for `open_corpus`, but not token shards.
        out: created, or filled if it is empty, only when everything has been written.
        tokenizer: as for `open_corpus`, or `bpe` or `wordpiece`, trained on the source.
        vocab_size: for bpe and wordpiece only.
        val_fraction: as for `open_corpus`; None: 0.1 of a text, 0.005 of a set of documents.
        separator: text between the documents of a text file; None: each file is one document.
        field: the field or column of text in JSON lines, Parquet and the hub's data sets.
        encoding: encoding of text files, by Python's name.
        shard_tokens: number of tokens in each shard but the last.
        options: `workers`, `report` and `save_every_s` of `write_directory`.
    Raises:
        UserError: as for `open_corpus`, or `out` is not empty, or another process is writing it.
    """
    out = Path(out).expanduser().resolve()
    fraction = DOCUMENT_FRACTION if val_fraction is None else val_fraction
    check_settings(fraction, shard_tokens, options.get("workers"))
    if tokenizer != "auto":
        check_kind(tokenizer, vocab_size)
    complete = (out / PROGRESS).is_file()
    if out.exists() and not complete and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory: use another one or remove it")
    if out.is_mount():
        raise UserError(f"{out} is a mount point: use a folder inside it")
    if (Path(source).expanduser() / MANIFEST).is_file():
        raise UserError(f"{source} is already a prepared directory: it has a {MANIFEST}")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out.parent).close()
    if tokenizer == "gpt2" or (
        tokenizer == "auto" and (source in HUB or source.startswith(HUB_PREFIX))
    ):
        make_tokenizer("gpt2", None)  # fails before a long download if its files are missing
    request = _request(
        find_source(source, separator=separator, field=field, encoding=encoding),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val_fraction=val_fraction,
        shard_tokens=shard_tokens,
    )
    with writing(out), _locked(out, wait=False):
        if not complete:
            _warn_of_files(request.source)
            _prepare_whole(request, out, **options)
        elif load_progress(out, request) is not None:
            logger.warning("%s is complete already: nothing is left to do", out)
        else:
            raise UserError(f"{out / PROGRESS} is damaged: remove {out} to start again")
    return out


def _request(
    source: Source, *, tokenizer: str, val_fraction: float | None, **settings: Any
) -> Request:
    if tokenizer == "auto":
        plain = "chars" if source.name == "shakespeare" else "bytes"
        tokenizer = plain if source.plain else "gpt2"
    if val_fraction is None:
        val_fraction = TAIL_FRACTION if source.plain else DOCUMENT_FRACTION
    return Request(source=source, tokenizer=tokenizer, val_fraction=val_fraction, **settings)


def _prepare_whole(request: Request, out: Path, **options: Any) -> None:
    """Writes a directory beside `out`, or resumes an interrupted one, and renames it to `out`."""
    unfinished = _unfinished(out)
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


def _unfinished(out: Path) -> Path:
    """Returns the path where `out` is written until it is complete."""
    return out.with_name(f"{out.name}.incomplete")


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
    try:
        yield
    finally:
        lock.release()


def _shakespeare_tokens(tokenizer: str, val_fraction: float) -> Corpus | None:
    """Finds cached tokens of tiny shakespeare, if its text would have to be downloaded again."""
    if any((folder / sources.SHAKESPEARE_FILE).is_file() for folder in (data_dir(), cache_dir())):
        return None
    kind = "chars" if tokenizer == "auto" else tokenizer
    asked = (sources.SHAKESPEARE_SHA256, kind, val_fraction)
    for manifest in (cache_dir() / "corpora").glob(f"shakespeare-*/{MANIFEST}"):
        found = _read_if_whole(manifest.parent)
        if found and (found.sha256, found.tokenizer.kind, found.manifest["val_fraction"]) == asked:
            return found
    return None


def _read_if_whole(path: Path) -> Corpus | None:
    if not path.exists():
        return None
    try:
        corpus = read_prepared(path)
        check_once(corpus.shards(), corpus.tokenizer.vocab_size)
    except (UserError, OSError) as error:
        logger.warning("preparing the cached corpus again: %s", error)
        return None
    return corpus
