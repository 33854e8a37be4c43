"""Checks of a shard's content: token ids within the vocabulary, and checksums.

Reading every shard takes a while, so the results are cached: a shard is read again only if its size
or modification time has changed.
"""

import hashlib
import io
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastgpt.data.shards import HEADER_BYTES, Tokens, read_header
from fastgpt.errors import UserError, counted
from fastgpt.files import cache_dir, cores, write_atomically

BLOCK_BYTES = 4 * 2**20
"""Number of bytes that one CRC covers, few enough to locate damage in a shard."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Path and recorded checksums of a shard; the checksums are None for another program's."""

    path: Path
    sha256: str | None = None
    crc32: tuple[int, ...] | None = None
    """CRC-32 of each `BLOCK_BYTES` of the file, header included."""


def checksums(path: Path) -> dict[str, Any]:
    """Computes the `sha256` and `crc32` of a file, as the manifest stores them."""
    whole, blocks = hashlib.sha256(), []
    for block in _blocks(path):
        whole.update(block)
        blocks.append(zlib.crc32(block))
    return {"sha256": whole.hexdigest(), "crc32": blocks}


def check_shard(shard: Shard, vocab_size: int, *, sha256: bool = True) -> None:
    """Reads a whole shard, and checks its header, token ids and checksums.

    Args:
        vocab_size: every id must be smaller.
        sha256: False checks the CRCs only, which are faster and detect disk errors.

    Raises:
        UserError: the shard is damaged; the message names the file and the byte.
    """
    path, whole = shard.path, hashlib.sha256()
    _, dtype = read_header(path)
    for number, block in enumerate(_blocks(path)):
        start = number * BLOCK_BYTES
        if shard.crc32 is not None and shard.crc32[number : number + 1] != (zlib.crc32(block),):
            raise UserError(
                f"{path}: damaged between byte {start:,} and byte {start + len(block):,}:"
                f" its CRC-32 is not the recorded one; prepare or copy it again"
            )
        if sha256:
            whole.update(block)
        skipped = max(0, HEADER_BYTES - start)
        ids = np.frombuffer(block, dtype, offset=skipped)
        if ids.size and ids.max() >= vocab_size:
            first = int(np.argmax(ids >= vocab_size))
            raise UserError(
                f"{path}: token id {ids[first]} at byte {start + skipped + first * ids.itemsize:,},"
                f" but the vocabulary ends at {vocab_size - 1}"
            )
    if sha256 and shard.sha256 not in (None, whole.hexdigest()):
        raise UserError(f"{path}: sha256 {whole.hexdigest()}, expected {shard.sha256}")


def check_once(shards: Sequence[Shard], vocab_size: int) -> None:
    """Runs `check_shard` on the shards that have not passed it unchanged with this vocabulary.

    Raises:
        UserError: as `check_shard`, for the first shard that fails.
    """
    record = cache_dir() / "checked" / f"{_key(shards, vocab_size)}.json"
    passed = _read_record(record)
    stamps = {str(shard.path.resolve()): file_stamp(shard.path) for shard in shards}
    due = [s for s in shards if passed.get(str(s.path.resolve())) != file_stamp(s.path)]
    if not due:
        return
    size = sum(shard.path.stat().st_size for shard in due)
    if size > 2**30:
        logger.warning("checking %s once (%.1f GB)", counted(len(due), "shard"), size / 1e9)
    passed = {path: stamp for path, stamp in stamps.items() if passed.get(path) == stamp}
    try:
        with ThreadPoolExecutor(cores()) as pool:
            checks = pool.map(lambda shard: check_shard(shard, vocab_size, sha256=False), due)
            for shard, _ in zip(due, checks):
                path = str(shard.path.resolve())
                passed[path] = stamps[path]
    finally:
        with suppress(OSError):  # a cache that cannot be written only costs time
            record.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(record, json.dumps(passed).encode())


def document_starts(tokens: Tokens, eot_id: int) -> np.ndarray:
    """Finds the offsets where documents begin: the first token, and each end-of-text token.

    Returns:
        (documents,) int64, increasing, memory-mapped from the cache after the first time.
    """
    shards = [Shard(path=path) for path in tokens.paths]
    stamps = [file_stamp(path) for path in tokens.paths]
    key = hashlib.sha256(repr((_key(shards, eot_id), stamps)).encode()).hexdigest()[:32]
    cached = cache_dir() / "documents" / f"{key}.npy"
    with suppress(OSError, ValueError):
        return np.asarray(np.load(cached, mmap_mode="r"))
    starts = _find(tokens, eot_id)
    with suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, starts)
        write_atomically(cached, buffer.getbuffer())
    return starts


def _find(tokens: Tokens, eot_id: int) -> np.ndarray:
    step = BLOCK_BYTES
    found = (
        np.flatnonzero(tokens[start : start + step] == eot_id) + start
        for start in range(0, len(tokens), step)
    )
    starts = np.concatenate([np.zeros(1, np.int64), *found])
    return starts[1:] if len(starts) > 1 and starts[1] == 0 else starts


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _key(shards: Sequence[Shard], number: int) -> str:
    paths = [str(shard.path.resolve()) for shard in shards]
    return hashlib.sha256(repr((paths, number)).encode()).hexdigest()[:32]


def file_stamp(path: str | Path) -> list[int]:
    """Returns the size and modification time of a file, which tell whether it was changed."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def _read_record(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}
