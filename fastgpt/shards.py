"""Token shards in llm.c's `.bin` format, written whole or not at all.

Layout
    256 int32 of header: magic 20240520, version 1, number of tokens, then zeros.
    The tokens, uint16. Both little-endian; nothing follows the last token.
Source
    llm.c, `dev/data/data_common.py` and `llmc/dataloader.h`; modded-nanogpt reads the same files.
"""

import os
import secrets
from pathlib import Path

import numpy as np

from fastgpt.errors import UserError

MAGIC = 20240520
VERSION = 1
HEADER = np.dtype("<i4")
TOKEN = np.dtype("<u2")
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * HEADER.itemsize
MAX_ID = np.iinfo(TOKEN).max
MAX_TOKENS = np.iinfo(HEADER).max


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Writes `tokens` as one shard; the name `path` appears only once the file is complete.

    Args:
        path: the file to write, or to replace; its folder must exist.
        tokens: (N,), any integer dtype, 0 <= id <= 65535, N >= 1.
    Raises:
        UserError: no token, too many for the header, or an id that uint16 cannot hold.
    """
    path = Path(path)
    if not 1 <= tokens.size <= MAX_TOKENS:
        raise UserError(f"{path}: a shard holds 1 to {MAX_TOKENS:,} tokens, not {tokens.size:,}")
    if tokens.min() < 0 or tokens.max() > MAX_ID:
        position = int(np.argmax((tokens < 0) | (tokens > MAX_ID)))
        found = f"token {position:,} is {tokens[position]}"
        raise UserError(f"{path}: {found}, but a shard holds ids from 0 to {MAX_ID}")
    header = np.zeros(HEADER_INTS, HEADER)
    header[:3] = MAGIC, VERSION, tokens.size
    write_atomically(path, header.data, np.ascontiguousarray(tokens, TOKEN).data)


def read_shard(path: Path) -> np.ndarray:
    """Opens a shard without reading it into memory.

    Returns:
        (N,) uint16, read-only, memory-mapped: pages are read when they are touched.
    Raises:
        UserError: no such file, or magic, version or length are not as the format asks.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such shard")
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes, too short for a shard's header of {HEADER_BYTES}")
    magic, version, count = (int(n) for n in np.fromfile(path, HEADER, count=3))
    if magic != MAGIC:
        raise UserError(f"{path}: not a token shard: magic {magic}, expected {MAGIC}")
    if version != VERSION:
        raise UserError(f"{path}: shard version {version}, expected {VERSION}")
    expected = HEADER_BYTES + count * TOKEN.itemsize
    if count < 1 or size != expected:
        raise UserError(
            f"{path}: damaged shard: the header promises {count:,} tokens"
            f" ({expected:,} bytes), the file has {size:,} bytes"
        )
    return np.memmap(path, TOKEN, mode="r", offset=HEADER_BYTES, shape=(count,))


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Writes `parts` one after the other under a temporary name, syncs, and renames to `path`.

    A crash, a full disk or a second writer never leaves a half-written file named `path`.
    """
    path = Path(path)
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other process or call will take."""
    return path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def sync_directory(path: Path) -> None:
    """Makes the names in a folder survive a power cut, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
