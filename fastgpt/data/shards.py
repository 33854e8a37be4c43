"""Token shards in llm.c's `.bin` formats, which are read as one sequence.

Layout
    256 int32 of header: magic, version, number of tokens, then zeros.
    The tokens. All little-endian; nothing follows the last token.
    magic 20240520, version 1: uint16, for vocabularies of up to 65,536 (GPT-2's)
    magic 20240801, version 7: uint32, for larger ones (Llama-3's)
Source
    llm.c, `dev/data/data_common.py` and `llmc/dataloader.h`; modded-nanogpt reads the first kind.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from fastgpt.errors import UserError, counted

HEADER = np.dtype("<i4")
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * HEADER.itemsize
MAX_TOKENS = np.iinfo(HEADER).max
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Magic: (version, dtype of a token)."""
SMALL, LARGE = (dtype for _, dtype in FORMATS.values())

OPEN_FILES = 128
"""Largest number of shards that are open at a time: a process may often have 1,024 open files."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smaller of the two dtypes that holds the ids 0 to `vocab_size - 1`."""
    return SMALL if vocab_size <= np.iinfo(SMALL).max + 1 else LARGE


def shard_header(count: int, dtype: np.dtype) -> memoryview:
    """Returns the header of a shard of `count` tokens of `dtype`, `HEADER_BYTES` long."""
    [(magic, version)] = [(m, v) for m, (v, kind) in FORMATS.items() if kind == dtype]
    header = np.zeros(HEADER_INTS, HEADER)
    header[:3] = magic, version, count
    return header.data


def read_header(path: Path) -> tuple[int, np.dtype]:
    """Reads the number of tokens and the dtype of a shard, and checks them against its size.

    Raises:
        UserError: the file is missing, or its magic, version or length is wrong.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such shard")
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes, too short for a shard's header of {HEADER_BYTES}")
    magic, version, count = (int(n) for n in np.fromfile(path, HEADER, count=3))
    if magic not in FORMATS:
        known = " or ".join(map(str, FORMATS))
        raise UserError(f"{path}: not a token shard: magic {magic} at byte 0, expected {known}")
    known_version, dtype = FORMATS[magic]
    if version != known_version:
        raise UserError(f"{path}: shard version {version} at byte 4, expected {known_version}")
    expected = HEADER_BYTES + count * dtype.itemsize
    if count < 1 or size != expected:
        raise UserError(
            f"{path}: damaged shard: the header says {counted(count, 'token')} at byte 8"
            f" ({expected:,} bytes), but the file ends at byte {size:,}"
        )
    return count, dtype


class _OpenFile:
    """A file that is open for reading as long as it is used."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.handle)  # when the interpreter ends, `os` may be gone


class Tokens:
    """Sequence of the tokens of several shards, which supports `tokens[start:stop]` and `len`.

    Only what is asked for is read, also by several threads at once.

    Args:
        paths: the shards in order, all of one dtype.

    Raises:
        UserError: there are no shards, one is damaged, or their dtypes differ.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(map(Path, paths))
        if not self.paths:
            raise UserError("no token shards: expected at least one")
        headers = [read_header(path) for path in self.paths]
        self.dtype = headers[0][1]
        for path, (_, dtype) in zip(self.paths, headers):
            if dtype != self.dtype:
                raise UserError(f"{path} holds {dtype}, but {self.paths[0]} holds {self.dtype}")
        self.counts = np.array([count for count, _ in headers], np.int64)
        self._ends = np.cumsum(self.counts)
        self._opened = lru_cache(OPEN_FILES)(_OpenFile)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """Returns (stop - start,) tokens, read-only if they are of one shard."""
        start, stop, step = window.indices(len(self))
        assert step == 1, "shards are read forwards, token by token"
        parts = []
        while start < stop:
            number = int(self._ends.searchsorted(start, side="right"))
            end = int(self._ends[number])
            begin, count = end - int(self.counts[number]), min(stop, end) - start
            parts.append(self._read(self.paths[number], start - begin, count))
            start += count
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def _read(self, path: Path, start: int, count: int) -> np.ndarray:
        size, place = count * self.dtype.itemsize, HEADER_BYTES + start * self.dtype.itemsize
        file = self._opened(path)  # keeps it open, even if another thread's read evicts it
        data = os.pread(file.handle, size, place)
        if len(data) != size:
            raise UserError(f"{path} ends at byte {place + len(data):,}: it was cut while in use")
        return np.frombuffer(data, self.dtype)
