"""Checks of a shard's content: token ids within the vocabulary, and its sha256.

Reading every shard takes a while, so each is read again only if its size or modification time has
changed since it passed.
"""

import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from fastgpt.data.shards import Tokens
from fastgpt.errors import UserError, counted
from fastgpt.files import cache_dir, cores, sha256_of, write_atomically

BLOCK_TOKENS = 2**22
"""Number of tokens that are read at a time."""

logger = logging.getLogger(__name__)


def check_shard(path: Path, sha256: str | None, vocab_size: int) -> None:
    """Reads a whole shard, and checks its header, its sha256 and its token ids.

    Args:
        sha256: recorded hash; None for another program's shard, which has none.

    Raises:
        UserError: the shard is damaged; the message names the file.
    """
    tokens = Tokens([path])
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise UserError(
            f"{path} is damaged: its sha256 is {found}, expected {sha256}; prepare or copy it again"
        )
    largest = max(int(ids.max()) for _, ids in _blocks(tokens))
    if largest >= vocab_size:
        raise UserError(
            f"{path} has the token id {largest}, but the vocabulary ends at {vocab_size - 1}"
        )


def check_all(shards: dict[Path, str | None], vocab_size: int) -> None:
    """Runs `check_shard` on all shards, of which each has the sha256 recorded for it, or None."""
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(lambda path: check_shard(path, shards[path], vocab_size), shards))


def check_once(shards: dict[Path, str | None], vocab_size: int) -> None:
    """Runs `check_shard` on the shards that have not passed it unchanged with this vocabulary."""
    passed = {x: _cached("checked", [x], (sha256, vocab_size)) for x, sha256 in shards.items()}
    new = [path for path in shards if not passed[path].exists()]
    size = sum(path.stat().st_size for path in new)
    if size > 2**30:
        logger.warning("checking %s once (%.1f GB)", counted(len(new), "shard"), size / 1e9)

    def check(path: Path) -> None:
        check_shard(path, shards[path], vocab_size)
        with suppress(OSError):  # a cache that cannot be written only costs time
            passed[path].parent.mkdir(parents=True, exist_ok=True)
            passed[path].touch()

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(check, new))


def document_starts(tokens: Tokens, eot_id: int) -> np.ndarray:
    """Finds the offsets where documents begin: the first token, and each end-of-text token.

    Returns:
        (documents,) int64, increasing, memory-mapped from the cache after the first time.
    """
    cached = _cached("documents", tokens.paths, eot_id).with_suffix(".npy")
    with suppress(OSError, ValueError):
        return np.asarray(np.load(cached, mmap_mode="r"))
    found = (np.flatnonzero(ids == eot_id) + start for start, ids in _blocks(tokens))
    starts = np.unique(np.concatenate([np.zeros(1, np.int64), *found]))
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, starts)
        write_atomically(cached, buffer.getbuffer())
    return starts


def _blocks(tokens: Tokens) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(tokens), BLOCK_TOKENS):
        yield start, tokens[start : start + BLOCK_TOKENS]


def _cached(kind: str, paths: Sequence[Path], asked: object) -> Path:
    """Returns the path in the cache for an answer about files as they are now."""
    files = [(str(path.resolve()), file_stamp(path)) for path in paths]
    key = hashlib.sha256(repr((files, asked)).encode()).hexdigest()[:32]
    return cache_dir() / kind / key


def file_stamp(path: str | Path) -> list[int]:
    """Returns the size and modification time of a file, which tell whether it was changed."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]
