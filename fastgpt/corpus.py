"""A corpus as the trainer sees it: memory-mapped tokens, split in two, with their tokenizer.

A prepared directory holds `train_000000.bin`, `val_000000.bin`, `tokenizer.json` and, written
last, `manifest.json`. It is built under a temporary name and renamed when it is complete, so a
directory that has a manifest is whole. `open_corpus` keeps such directories in the cache.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, AnyStr

import numpy as np

from fastgpt.errors import UserError, unknown_name
from fastgpt.shards import (
    read_shard,
    sync_directory,
    temporary_name,
    write_atomically,
    write_shard,
)  # fmt: skip
from fastgpt.sources import Source, cache_dir, data_dir, read_source
from fastgpt.tokenizer import FILE_NAME as TOKENIZER
from fastgpt.tokenizer import KINDS, ByteTokenizer, Tokenizer, load_tokenizer, make_tokenizer

__all__ = ["Corpus", "cache_dir", "data_dir", "open_corpus", "prepare"]

FORMAT_VERSION = 1
"""Of the prepared directory; part of the cache's key, so old entries are simply not found."""
MANIFEST = "manifest.json"
SHARD = "{split}_{number:06d}.bin"
SPLITS = ("train", "val")
INSTALL_ATTEMPTS = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Tokens to train on and tokens to validate on."""

    name: str
    """Short and fit for a file name."""
    train: np.ndarray
    """(N,) uint16, memory-mapped."""
    val: np.ndarray
    """(M,) uint16, memory-mapped: the end of the text."""
    tokenizer: Tokenizer
    """What made the tokens."""
    val_bytes_per_token: float | None
    """Bytes of UTF-8 behind one token of `val`, for bits per byte; None if it is not known."""
    sha256: str
    """Of the bytes of the source."""
    python: str | None
    """The Python version whose library the built-in corpus is; None for every other one."""
    path: Path
    """The prepared directory."""


def open_corpus(source: str, *, tokenizer: str, val_fraction: float) -> Corpus:
    """Opens a corpus, preparing it in the cache the first time.

    Args:
        source: `builtin`, `shakespeare`, a prepared directory, a file, or a folder of text files.
        tokenizer: a kind in `KINDS`, or `auto`: characters for shakespeare, what was saved for a
            prepared directory, bytes for the rest.
        val_fraction: in (0, 1), the part at the end of the text kept for validation. A prepared
            directory has been split already and keeps its split.
    Raises:
        UserError: nothing to read there, or it cannot be split or tokenized as asked.
    """
    _check_request(tokenizer, val_fraction)
    path = Path(source).expanduser()
    if (path / MANIFEST).is_file():
        corpus = _read_prepared(path)
        if tokenizer not in ("auto", corpus.tokenizer.kind):
            kind = corpus.tokenizer.kind
            raise UserError(f"{path} was prepared with tokenizer {kind!r}, not {tokenizer!r}")
        return corpus
    found = read_source(source)
    kind = _resolve(tokenizer, source)
    key = hashlib.sha256(repr((FORMAT_VERSION, found.sha256, kind, val_fraction)).encode())
    entry = cache_dir() / "corpora" / f"{found.name}-{key.hexdigest()[:16]}"
    for _ in range(INSTALL_ATTEMPTS):
        if (cached := _read_if_whole(entry)) is not None:
            return cached
        with _temporary_directory(entry) as built:
            _build(found, built, kind=kind, val_fraction=val_fraction)
            _install(built, entry)
    return _read_prepared(entry)


def prepare(source: str, out: Path, *, tokenizer: str, val_fraction: float) -> Path:
    """Writes a prepared directory to `out`, which must be empty or not exist; returns it.

    Args:
        source: as for `open_corpus`, except a directory that is prepared already.
        out: appears, or gets its content, only when everything has been written.
        tokenizer: as for `open_corpus`.
        val_fraction: as for `open_corpus`.
    Raises:
        UserError: as for `open_corpus`, or `out` is not empty.
    """
    _check_request(tokenizer, val_fraction)
    out = Path(out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; give another one or remove it")
    if (Path(source).expanduser() / MANIFEST).is_file():
        raise UserError(f"{source} is a prepared directory already: it has a {MANIFEST}")
    found = read_source(source)
    with _temporary_directory(out) as built:
        _build(found, built, kind=_resolve(tokenizer, source), val_fraction=val_fraction)
        os.replace(built, out)
        sync_directory(out.parent)
    return out


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
        raise UserError(f"{path / MANIFEST}: format {version!r}, expected {FORMAT_VERSION}")
    return manifest


def _check_request(tokenizer: str, val_fraction: float) -> None:
    if tokenizer not in ("auto", *KINDS):
        raise unknown_name("tokenizer", tokenizer, ("auto", *KINDS))
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction must lie between 0 and 1, not {val_fraction}")


def _resolve(tokenizer: str, source: str) -> str:
    if tokenizer != "auto":
        return tokenizer
    return "chars" if source == "shakespeare" else "bytes"


# --- reading a prepared directory -----------------------------------------------------------------


def _read_prepared(path: Path) -> Corpus:
    manifest = read_manifest(path)
    try:
        val = manifest["splits"]["val"]
        return Corpus(
            name=manifest["name"],
            train=_read_split(path, manifest["splits"]["train"]),
            val=_read_split(path, val),
            tokenizer=load_tokenizer(path / TOKENIZER),
            val_bytes_per_token=val["bytes"] / val["tokens"] if val["bytes"] else None,
            sha256=manifest["sha256"],
            python=manifest["python"],
            path=path,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{path / MANIFEST} is damaged ({error!r})") from error


def _read_split(path: Path, split: dict[str, Any]) -> np.ndarray:
    [shard] = split["shards"]
    tokens = read_shard(path / shard["file"])
    if tokens.size != shard["tokens"]:
        raise UserError(
            f"{path / shard['file']} has {tokens.size:,} tokens,"
            f" but {MANIFEST} says {shard['tokens']:,}"
        )
    return tokens


def _read_if_whole(path: Path) -> Corpus | None:
    if not path.exists():
        return None
    try:
        return _read_prepared(path)
    except (UserError, OSError) as error:  # OSError: replaced by another process as we read it
        logger.warning("preparing the cached corpus again: %s", error)
        return None


# --- writing a prepared directory -----------------------------------------------------------------


def _build(source: Source, out: Path, *, kind: str, val_fraction: float) -> None:
    """Fills the empty directory `out`; the manifest comes last."""
    if source.skipped:
        logger.warning(
            "%s: %d files read, %d skipped (hidden, binary or not UTF-8)",
            source.name, source.files, source.skipped,
        )  # fmt: skip
    tokenizer, parts = _tokenize(source, kind, val_fraction)
    splits = {}
    for split, (tokens, num_bytes) in zip(SPLITS, parts, strict=True):
        shard = out / SHARD.format(split=split, number=0)
        write_shard(shard, tokens)
        sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
        entry = {"file": shard.name, "tokens": tokens.size, "sha256": sha256}
        splits[split] = {"tokens": tokens.size, "bytes": num_bytes, "shards": [entry]}
    tokenizer.save(out / TOKENIZER)
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": source.name,
        "sha256": source.sha256,
        "python": source.python,
        "files": source.files,
        "skipped_files": source.skipped,
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "val_fraction": val_fraction,
        "splits": splits,
    }
    write_atomically(out / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _tokenize(
    source: Source, kind: str, val_fraction: float
) -> tuple[Tokenizer, list[tuple[np.ndarray, int]]]:
    """The tokenizer, then (tokens, number of bytes) of the train and of the val split."""
    if kind == "bytes":
        # not through text: any file at all can be learnt byte by byte
        byte_tokenizer = ByteTokenizer()
        raw = _split(source.data, val_fraction)
        return byte_tokenizer, [(byte_tokenizer.encode_bytes(part), len(part)) for part in raw]
    text = _decode(source)
    tokenizer = make_tokenizer(kind, text)
    parts = _split(text, val_fraction)
    return tokenizer, [(tokenizer.encode(part), len(part.encode())) for part in parts]


def _decode(source: Source) -> str:
    try:
        return source.data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"corpus {source.name!r} is not UTF-8 (byte 0x{source.data[error.start]:02X} at"
            f" offset {error.start:,}); the bytes tokenizer reads it as it is"
        ) from error


def _split(text: AnyStr, val_fraction: float) -> tuple[AnyStr, AnyStr]:
    cut = int(len(text) * (1 - val_fraction))
    if not 0 < cut < len(text):
        raise UserError(
            f"val_fraction {val_fraction} of {len(text)} characters or bytes leaves nothing to"
            f" {'train on' if cut == 0 else 'validate on'}"
        )
    return text[:cut], text[cut:]


# --- directories that appear whole ----------------------------------------------------------------


@contextmanager
def _temporary_directory(target: Path) -> Iterator[Path]:
    """A new directory beside `target`, to be renamed to it; removed if it was not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = temporary_name(target)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _install(built: Path, target: Path) -> None:
    """Renames `built` to `target`, unless another process has put a whole one there meanwhile."""
    if _read_if_whole(target) is not None:
        return
    damaged = temporary_name(target)
    try:
        with suppress(FileNotFoundError):
            os.replace(target, damaged)
        os.replace(built, target)
    except OSError as error:
        # another process came between the two steps: the caller looks at what it has put there
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(damaged, ignore_errors=True)
    sync_directory(target.parent)
