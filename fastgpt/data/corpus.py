"""A corpus as the trainer sees it: memory-mapped tokens, split in two, with their tokenizer.

A prepared directory holds shards `train_000000.bin` ..., `val_000000.bin` ..., `tokenizer.json` and
`manifest.json`. It is built beside its place, in `NAME.incomplete`, and renamed when it is
complete. `open_corpus` keeps such directories in the cache.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from fastgpt.data.build import (
    FORMAT_VERSION,
    MANIFEST,
    PROGRESS,
    SHARD_TOKENS,
    Report,
    Request,
    build,
)
from fastgpt.data.download import sha256_of
from fastgpt.data.shards import LARGE, Tokens
from fastgpt.data.sources import HUB, HUB_PREFIX, Source, find_source
from fastgpt.data.tokenizer import FILE_NAME as TOKENIZER
from fastgpt.data.tokenizer import (
    Tokenizer,
    check_kind,
    load_tokenizer,
    make_tokenizer,
    same_tokenizer,
)
from fastgpt.data.verify import Shard, check_once, document_starts
from fastgpt.errors import UserError, writing
from fastgpt.storage import cache_dir, sync_directory

TAIL_FRACTION, DOCUMENT_FRACTION = 0.1, 0.005
"""Held out by default: of a text, of a set of documents."""
SAMPLED_BYTES = 4096
"""Of the beginning and end of each shard, to tell one set of another program from the next."""

PATIENCE_S = 2
"""Before it is said that another process is waited for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Tokens to train on and tokens to validate on."""

    name: str
    """Short and fit for a file name."""
    train: Tokens
    """(N,) uint16 or uint32, memory-mapped."""
    val: Tokens
    """(M,), memory-mapped: what is held out."""
    tokenizer: Tokenizer
    """What made the tokens."""
    val_bytes_per_token: float | None
    """Bytes of UTF-8 behind one token of `val`, for bits per byte; None if it is not known."""
    sha256: str
    """Of the text, or of what else tells it from every other one."""
    python: str | None
    """The Python version whose library the built-in corpus is; None for every other one."""
    path: Path
    """The directory of the shards."""
    manifest: dict[str, Any]
    """As it was written; empty for the shards of another program."""

    @property
    def identity(self) -> str:
        """A sha256 of all tokens: the same text may be tokenized or split in another way."""
        hashes = [shard.sha256 for shard in self.shards()]
        return hashlib.sha256(repr((self.sha256, hashes)).encode()).hexdigest()

    def document_starts(self, split: str) -> np.ndarray:
        """Where the documents of `train` or `val` begin: (documents,) int64, increasing.

        Raises:
            UserError: the tokenizer has no token to tell documents apart.
        """
        if self.tokenizer.eot_id is None:
            raise UserError(
                f"{self.name}: the {self.tokenizer.kind} tokenizer has no end-of-text token to tell"
                " documents apart: prepare it with another, gpt2 say"
            )
        return document_starts(getattr(self, split), self.tokenizer.eot_id)

    def shards(self) -> list[Shard]:
        """Every shard, with the checksums that were written down for it."""
        if not self.manifest:
            return [Shard(path=path) for path in (*self.train.paths, *self.val.paths)]
        entries = [e for split in self.manifest["splits"].values() for e in split["shards"]]
        return [
            Shard(path=self.path / e["file"], sha256=e["sha256"], crc32=tuple(e["crc32"]))
            for e in entries
        ]


def open_corpus(
    source: str, *, tokenizer: str, val_fraction: float, report: Report | None = None
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
        report: see `build`.
    Raises:
        UserError: nothing to read there, it cannot be split or tokenized as asked, or a shard is
            damaged or holds an id that the tokenizer does not know.
    """
    path = Path(source).expanduser()
    if tokenizer != "auto":
        check_kind(tokenizer, None)
    if (path / MANIFEST).is_file() or (path.is_dir() and any(path.glob("*train*.bin"))):
        return open_shards(path, tokenizer=tokenizer)
    request = _request(find_source(source), tokenizer=tokenizer, val_fraction=val_fraction)
    key = hashlib.sha256(json.dumps(request.facts()).encode()).hexdigest()[:16]
    entry = cache_dir() / "corpora" / f"{request.source.name}-{key}"
    with writing(entry), _locked(entry):
        if (cached := _read_if_whole(entry)) is not None:
            return cached
        shutil.rmtree(entry, ignore_errors=True)
        _build_whole(request, entry, report=report)
    return _read_prepared(entry)


def open_shards(path: Path, *, tokenizer: str) -> Corpus:
    """Opens a prepared directory, or a folder of shards that another program wrote.

    Args:
        path: the folder.
        tokenizer: as for `open_corpus`.
    Raises:
        UserError: as `open_corpus`.
    """
    if (path / MANIFEST).is_file():
        corpus = _read_prepared(path)
        _check_tokenizer(corpus, tokenizer)
    else:
        corpus = _read_foreign(path, tokenizer)
    check_once(corpus.shards(), corpus.tokenizer.vocab_size)
    return corpus


def prepare(
    source: str,
    out: Path,
    *,
    tokenizer: str = "auto",
    vocab_size: int | None = None,
    val_fraction: float | None = None,
    separator: str | None = None,
    field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    **options: Any,
) -> Path:
    """Writes a prepared directory to `out`, going on with what an earlier call left; returns it.

    Args:
        source: as for `open_corpus`, except what is tokens already.
        out: appears, or gets its content, only when everything has been written.
        tokenizer: as for `open_corpus`, or `bpe` or `wordpiece`, trained on the source.
        vocab_size: of a tokenizer that is trained.
        val_fraction: as for `open_corpus`; None: 0.1 of a text, 0.005 of a set of documents.
        separator: what stands between documents in text files.
        field: the field or column of text in JSON lines, Parquet and the hub's data sets.
        shard_tokens: tokens in each shard but the last.
        options: `workers`, `report` and `save_every_s` of `build`.
    Raises:
        UserError: as for `open_corpus`, or `out` is not empty, or another process is writing it.
    """
    out = Path(out).expanduser().resolve()
    if tokenizer != "auto":
        check_kind(tokenizer, vocab_size)
    renamed = (out / PROGRESS).is_file()  # killed with one last step to go
    if out.exists() and not renamed and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; give another one or remove it")
    if out.is_mount():
        raise UserError(f"{out} is where a file system is mounted; give a folder inside it")
    if (Path(source).expanduser() / MANIFEST).is_file():
        raise UserError(f"{source} is a prepared directory already: it has a {MANIFEST}")
    if tokenizer == "gpt2" or (
        tokenizer == "auto" and (source in HUB or source.startswith(HUB_PREFIX))
    ):
        make_tokenizer("gpt2", None)  # that its files are missing is said before a long download
    request = _request(
        find_source(source, separator=separator, field=field),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val_fraction=val_fraction,
        shard_tokens=shard_tokens,
    )
    with writing(out), _locked(out, wait=False):
        if renamed:
            os.replace(out, _unfinished(out))
        _build_whole(request, out, **options)
    return out


def _request(
    source: Source, *, tokenizer: str, val_fraction: float | None, **settings: Any
) -> Request:
    if tokenizer == "auto":
        plain = "chars" if source.name == "shakespeare" else "bytes"
        tokenizer = plain if source.plain else "gpt2"
    if val_fraction is None:
        val_fraction = TAIL_FRACTION if source.plain else DOCUMENT_FRACTION
    if source.skipped:
        logger.warning(
            "%s: %d files read, %d skipped (hidden, binary, not UTF-8, or of another kind)",
            source.name, len(source.files), source.skipped,
        )  # fmt: skip
    return Request(source=source, tokenizer=tokenizer, val_fraction=val_fraction, **settings)


def _build_whole(request: Request, out: Path, **options: Any) -> None:
    """Builds beside `out`, where a build that was broken off goes on, and renames."""
    unfinished = _unfinished(out)
    build(request, unfinished, **options)
    os.replace(unfinished, out)
    sync_directory(out.parent)
    (out / PROGRESS).unlink()  # until here, or what was finished could not be told from anything


def _unfinished(out: Path) -> Path:
    """Where what will be `out` is built."""
    return out.with_name(f"{out.name}.incomplete")


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Held by whoever writes `path`; the system lets go of it when a process ends."""
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


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a prepared directory.

    Raises:
        UserError: it is missing, is not JSON, or is of another format version.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except OSError as error:
        raise UserError(f"{path} is not a prepared directory: no {MANIFEST} in it") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / MANIFEST} is damaged ({error!r})") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path / MANIFEST}: format {version!r}, expected {FORMAT_VERSION}: prepare it again"
        )
    return manifest


def _read_prepared(path: Path) -> Corpus:
    manifest = read_manifest(path)
    try:
        val = manifest["splits"]["val"]
        corpus = Corpus(
            name=manifest["name"],
            train=_read_split(path, manifest["splits"]["train"]),
            val=_read_split(path, val),
            tokenizer=_read_tokenizer(path, manifest["tokenizer_sha256"]),
            val_bytes_per_token=val["bytes"] / val["tokens"] if val["bytes"] else None,
            sha256=manifest["sha256"],
            python=manifest["python"],
            path=path,
            manifest=manifest,
        )
        corpus.shards()  # their checksums are there
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path / MANIFEST} is damaged ({error!r})") from error
    return corpus


def _read_tokenizer(path: Path, sha256: str) -> Tokenizer:
    found = load_tokenizer(path / TOKENIZER)
    if sha256_of(path / TOKENIZER) != sha256:
        raise UserError(f"{path / TOKENIZER} is not the file that was written: another sha256")
    return found


def _read_split(path: Path, split: dict[str, Any]) -> Tokens:
    tokens = Tokens([path / shard["file"] for shard in split["shards"]])
    for shard, count in zip(split["shards"], tokens.counts.tolist()):
        if count != shard["tokens"]:
            raise UserError(
                f"{path / shard['file']} has {count:,} tokens, but {MANIFEST} says"
                f" {shard['tokens']:,}"
            )
    if len(tokens) != split["tokens"]:
        raise ValueError(f"shards of {len(tokens):,} tokens in all, not {split['tokens']:,}")
    return tokens


def _check_tokenizer(corpus: Corpus, asked: str) -> None:
    if asked in ("auto", corpus.tokenizer.kind):
        return
    path = Path(asked).expanduser()
    if not path.exists() or not same_tokenizer(corpus.tokenizer, load_tokenizer(path)):
        kind = corpus.tokenizer.kind
        raise UserError(f"{corpus.path} was prepared with tokenizer {kind!r}, not {asked!r}")


def _read_foreign(path: Path, tokenizer: str) -> Corpus:
    """Shards in a folder without a manifest, as llm.c and modded-nanogpt name them."""
    train, val = (sorted(path.glob(f"*{split}*.bin")) for split in ("train", "val"))
    if not train or not val:
        missing = " or ".join(f"*{n}*.bin" for n, f in (("train", train), ("val", val)) if not f)
        raise UserError(f"{path} has no {missing}: expected a {MANIFEST}, or shards of both splits")
    found = {"train": Tokens(train), "val": Tokens(val)}
    if tokenizer == "auto" and (path / TOKENIZER).is_file():
        tokenizer = str(path / TOKENIZER)
    if tokenizer == "auto" and found["train"].dtype == LARGE:
        raise UserError(
            f"{path} holds ids of 32 bits and no {TOKENIZER}: give the tokenizer that made them,"
            " --data.tokenizer PATH"
        )
    made_by = make_tokenizer("gpt2" if tokenizer == "auto" else tokenizer, None)
    return Corpus(
        name=path.resolve().name.lower(),
        **found,
        tokenizer=made_by,
        val_bytes_per_token=None,
        sha256=_fingerprint([*train, *val]),
        python=None,
        path=path,
        manifest={},
    )


def _fingerprint(paths: list[Path]) -> str:
    """Of shards nobody wrote a hash of: their names and sizes, and a little of each."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SAMPLED_BYTES))
            end = file.read()
            file.seek(0)
            digest.update(repr((path.name, size, file.read(SAMPLED_BYTES), end)).encode())
    return digest.hexdigest()


def _read_if_whole(path: Path) -> Corpus | None:
    if not path.exists():
        return None
    try:
        corpus = _read_prepared(path)
        check_once(corpus.shards(), corpus.tokenizer.vocab_size)
    except (UserError, OSError) as error:
        logger.warning("preparing the cached corpus again: %s", error)
        return None
    return corpus
