"""Prepares text for training: tokenizes it once, atomically, with one process at a time.

A prepared directory holds token shards, their tokenizer and a manifest. It is written beside its
place, in `NAME.incomplete`, and renamed when it is complete. What an interrupted process has
written is removed by the next one, which begins again.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fastgpt.data.corpus import (
    FORMAT_VERSION,
    MANIFEST,
    Corpus,
    has_shards,
    open_shards,
    read_manifest,
    read_prepared,
)  # fmt: skip
from fastgpt.data.reading import UTF_8, Source
from fastgpt.data.sources import HUB, HUB_PREFIX, find_source
from fastgpt.data.tokenizers import KINDS, check_kind, make_tokenizer, tokenizer_file
from fastgpt.data.verify import check_once, file_stamp
from fastgpt.data.writing import PrepareOptions, Report, write_directory
from fastgpt.errors import UserError, writing
from fastgpt.files import cache_dir, sync_directory

logger = logging.getLogger(__name__)


def open_corpus(
    source: str,
    *,
    tokenizer: str,
    val_fraction: float,
    encoding: str = UTF_8,
    documents: str = "gpt2",
    report: Report = lambda _: None,
) -> Corpus:
    """Opens a corpus, which is prepared in the cache the first time.

    Args:
        source: a name, a path or a dataset of the hub (see `find_source`), a prepared directory,
            or a folder of token shards that llm.c or modded-nanogpt wrote.
        tokenizer: a kind, the path of a `tokenizer.json`, or `auto`: the one saved with shards,
            else GPT-2's for shards; characters for shakespeare, `documents` for sets of documents,
            bytes for other text.
        val_fraction: in (0, 1); data that is split already keeps its split.
        encoding: encoding of text files, by Python's name.
    Raises:
        UserError: there is nothing to read, it cannot be split or tokenized as asked, or a shard is
            damaged or holds an id that the tokenizer does not have.
    """
    path = Path(source).expanduser()
    if tokenizer != "auto":
        check_kind(tokenizer, None)
    if has_shards(path):
        if encoding != UTF_8:
            raise UserError(f"encoding {encoding} is for text files only: {path} holds tokens")
        return open_shards(path, tokenizer=tokenizer)
    found = find_source(source, encoding=encoding)
    tokenizer = documents if tokenizer == "auto" and not found.plain else tokenizer
    settings = PrepareOptions(tokenizer=tokenizer, val_fraction=val_fraction).resolved(found)
    entry = cache_dir() / "corpora" / f"{found.name}-{_key(found, settings)}"
    with writing(entry), _locked(entry, wait=True):
        if entry.exists():
            try:
                corpus = read_prepared(entry)
                check_once(corpus.shards(), corpus.tokenizer.vocab_size)
                return corpus
            except (UserError, OSError) as error:
                logger.warning("preparing the cached corpus again: %s", error)
        shutil.rmtree(entry, ignore_errors=True)
        _prepare_whole(found, settings, entry, report=report)
    return read_prepared(entry)


def _key(source: Source, settings: PrepareOptions) -> str:
    """Returns a hash of everything that decides the result: files by path, size and time."""
    paths = [] if source.format == "hub" else [file.path for file in source.files]
    if settings.tokenizer not in KINDS:
        paths.append(str(tokenizer_file(Path(settings.tokenizer).expanduser())))
    facts = [FORMAT_VERSION, asdict(source), asdict(settings), *map(file_stamp, paths)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def prepare(
    source: str,
    out: Path,
    *,
    workers: int | None = None,
    report: Report = lambda _: None,
    **options: Any,
) -> Path:
    """Writes a prepared directory to `out`, and returns its path.

    The same call for a directory that is complete does nothing.

    Args:
        source: as for `open_corpus`, but not token shards.
        out: created, or filled if it is empty, only when everything has been written.
        options: fields of `PrepareOptions`.
    Raises:
        UserError: as for `open_corpus`, or `out` is not empty, or another process is writing it.
    """
    out, settings = Path(out).expanduser().resolve(), PrepareOptions(**options)
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}: expected 1 or more")
    if settings.tokenizer != "auto":
        check_kind(settings.tokenizer, settings.vocab_size)
    if has_shards(Path(source).expanduser()):
        raise UserError(f"{source} holds tokens already: only text can be prepared")
    if not (out / MANIFEST).is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is not an empty directory: use another one or remove it")
        if out.is_mount():
            raise UserError(f"{out} is a mount point: use a folder inside it")
    of_hub = source in HUB or source.startswith(HUB_PREFIX)
    if settings.tokenizer == "gpt2" or (settings.tokenizer == "auto" and of_hub):
        make_tokenizer("gpt2", None)  # fails before a long download if its files are missing
    found = find_source(
        source, separator=settings.separator, field=settings.field, encoding=settings.encoding
    )
    settings = settings.resolved(found)
    with writing(out), _locked(out, wait=False):
        if not (out / MANIFEST).is_file():
            _prepare_whole(found, settings, out, workers=workers, report=report)
        elif read_manifest(out).get("request") == {"source": found.given, **asdict(settings)}:
            logger.warning("%s is complete already: nothing is left to do", out)
        else:
            raise UserError(f"{out} holds another preparation: use another folder or remove it")
    return out


def _prepare_whole(source: Source, settings: PrepareOptions, out: Path, **options: Any) -> None:
    """Writes a directory beside `out`, and renames it to `out`."""
    unfinished = out.with_name(f"{out.name}.incomplete")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        write_directory(source, settings, unfinished, **options)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    os.replace(unfinished, out)
    sync_directory(out.parent)


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds the lock of `path`, which the system releases when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=-1 if wait else 0):
            yield
    except Timeout as error:
        raise UserError(f"another process is preparing {path}: wait until it ends") from error
