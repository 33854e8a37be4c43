"""Prepares text for training: once, whole or absent, by one process at a time.

Words
    source              files of text, and how to read them: what a name or a path means
    request             a source and settings, which decide every byte of what is prepared
    prepare             to make what is requested; `prepare` makes it where it is told to,
                        `open_corpus` in the cache
    prepared directory  the result: token shards, their tokenizer and a manifest
    progress            how far a request is, kept in the directory until it is complete

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
from fastgpt.data.prepare.request import PROGRESS, SHARD_TOKENS, Request, check_settings
from fastgpt.data.prepare.sources import HUB, HUB_PREFIX, Source, find_source
from fastgpt.data.prepare.text import UTF_8
from fastgpt.data.prepare.write import Report, write_directory
from fastgpt.data.tokenizers import check_kind, make_tokenizer
from fastgpt.data.verify import check_once
from fastgpt.errors import UserError, counted, writing
from fastgpt.storage import cache_dir, data_dir, sync_directory

TAIL_FRACTION, DOCUMENT_FRACTION = 0.1, 0.005
"""Fractions held out by default: of a text, and of a set of documents."""
PATIENCE_S = 2
"""Seconds before it is said that another process is waited for."""

logger = logging.getLogger(__name__)


def open_corpus(
    source: str,
    *,
    tokenizer: str,
    val_fraction: float,
    encoding: str = UTF_8,
    report: Report | None = None,
) -> Corpus:
    """Opens a corpus, preparing it in the cache the first time.

    Args:
        source: a name, a path or a data set of the hub (see `find_source`), a prepared directory,
            or a folder of token shards that llm.c or modded-nanogpt wrote.
        tokenizer: a kind, the path of a `tokenizer.json`, or `auto`: what was saved with shards,
            GPT-2's for shards without; characters for shakespeare, GPT-2's for sets of documents,
            bytes for other text.
        val_fraction: in (0, 1), what is held out for validation. What has been split already keeps
            its split.
        encoding: of text files, as Python names it.
        report: see `write_directory`.
    Raises:
        UserError: nothing to read there, it cannot be split or tokenized as asked, or a shard is
            damaged or holds an id that the tokenizer does not know.
    """
    path = Path(source).expanduser()
    if tokenizer != "auto":
        check_kind(tokenizer, None)
    if (path / MANIFEST).is_file() or (path.is_dir() and any(path.glob("*train*.bin"))):
        if encoding != UTF_8:
            raise UserError(f"encoding {encoding}: {path} holds tokens, expected text files")
        return open_shards(path, tokenizer=tokenizer)
    if source == "shakespeare" and (cached := _shakespeare_tokens(tokenizer, val_fraction)):
        return cached
    found = find_source(source, encoding=encoding)
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
    """Writes a prepared directory to `out`, resuming what an earlier call left; returns its path.

    Args:
        source: as for `open_corpus`, except what is tokens already.
        out: appears, or gets its content, only when everything has been written.
        tokenizer: as for `open_corpus`, or `bpe` or `wordpiece`, trained on the source.
        vocab_size: of a tokenizer that is trained.
        val_fraction: as for `open_corpus`; None: 0.1 of a text, 0.005 of a set of documents.
        separator: what stands between documents in text files.
        field: the field or column of text in JSON lines, Parquet and the hub's data sets.
        encoding: of text files, as Python names it.
        shard_tokens: tokens in each shard but the last.
        options: `workers`, `report` and `save_every_s` of `write_directory`.
    Raises:
        UserError: as for `open_corpus`, or `out` is not empty, or another process is writing it.
    """
    out = Path(out).expanduser().resolve()
    fraction = DOCUMENT_FRACTION if val_fraction is None else val_fraction
    check_settings(fraction, shard_tokens, options.get("workers"))
    if tokenizer != "auto":
        check_kind(tokenizer, vocab_size)
    renamed = (out / PROGRESS).is_file()  # killed with one last step to go
    if out.exists() and not renamed and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; give another one or remove it")
    if out.is_mount():
        raise UserError(f"{out} is where a file system is mounted; give a folder inside it")
    if (Path(source).expanduser() / MANIFEST).is_file():
        raise UserError(f"{source} is a prepared directory already: it has a {MANIFEST}")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out.parent).close()
    if tokenizer == "gpt2" or (
        tokenizer == "auto" and (source in HUB or source.startswith(HUB_PREFIX))
    ):
        make_tokenizer("gpt2", None)  # that its files are missing is said before a long download
    request = _request(
        find_source(source, separator=separator, field=field, encoding=encoding),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val_fraction=val_fraction,
        shard_tokens=shard_tokens,
    )
    with writing(out), _locked(out, wait=False):
        if renamed:
            os.replace(out, _unfinished(out))
        _prepare_whole(request, out, **options)
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
    """Writes a directory beside `out`, resuming what an earlier call left, and renames it."""
    unfinished = _unfinished(out)
    _warn_of_files(request.source)
    write_directory(request, unfinished, **options)
    os.replace(unfinished, out)
    sync_directory(out.parent)
    (out / PROGRESS).unlink()  # until here, or what was finished could not be told from anything


def _warn_of_files(source: Source) -> None:
    """Says which files are not read, or perhaps not as they were meant."""
    if source.skipped:
        logger.warning(
            "%s: %s read, %d skipped, the first because %s",
            source.name, counted(len(source.files), "file"), len(source.skipped), source.skipped[0],
        )  # fmt: skip
    tables = [file.path for file in source.files if file.path.lower().endswith((".csv", ".tsv"))]
    if tables:
        logger.warning(
            "%s is read as plain text, with its commas and quotes; to train on the texts of one"
            " column, write them as JSON lines", tables[0],
        )  # fmt: skip


def _unfinished(out: Path) -> Path:
    """Path where `out` is written before it is complete."""
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
            raise UserError(f"another process is preparing {path} now") from error
        logger.warning("waiting for another process, which prepares %s", path.name)
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
