"""Token shards in llm.c's `.bin` formats, which are read as one sequence.

Layout
    256 int32 of header: magic, version, number of tokens, then zeros.
    The tokens. All little-endian; nothing follows the last token.
    magic 20240520, version 1: uint16, for vocabularies of up to 65,536 (GPT-2's)
    magic 20240801, version 7: uint32, for larger ones (Llama-3's)
Source
    llm.c, `dev/data/data_common.py` and `llmc/dataloader.h`; modded-nanogpt reads the first kind.
"""

import mmap
from collections.abc import Sequence
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

MAPPED_SHARDS = 512
"""Largest number of files mapped at a time, because each map keeps a file descriptor; also at most
a quarter of the descriptors that the process may have."""
READS_BETWEEN_RELEASES = 128
"""Number of reads between two releases of mapped pages. A read of one window may map a whole large
folio of the page cache, 2 MiB (seen with Linux 6.18 on ext4; 64 KiB where there are none), so that
about 256 MiB count towards the resident set."""


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
    path = Path(path)
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


def _map(path: Path, count: int, dtype: np.dtype) -> tuple[np.ndarray, mmap.mmap]:
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # a plain array over the map: slicing an np.memmap costs as much as copying a row
    return np.frombuffer(pages, dtype, count, HEADER_BYTES), pages


def _mapped_at_most() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return MAPPED_SHARDS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAPPED_SHARDS if soft < 0 else max(1, min(MAPPED_SHARDS, soft // 4))


class Tokens:
    """Sequence of the tokens of several shards, which supports `tokens[start:stop]` and `len`.

    A slice is a view if it lies in one shard, a copy if it crosses shards. Files are mapped when
    they are read, and their pages are released now and then, so that the resident set stays
    bounded.

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
        self._maps: dict[int, tuple[np.ndarray, mmap.mmap]] = {}
        self._mapped_at_most = _mapped_at_most()
        self._touched: set[int] = set()
        self._reads = 0

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """Returns (stop - start,) tokens, read-only if it is a view."""
        start, stop, step = window.indices(len(self))
        assert step == 1, "shards are read forwards, token by token"
        if start >= stop:
            return np.empty(0, self.dtype)
        first = int(self._ends.searchsorted(start, side="right"))
        last = int(self._ends.searchsorted(stop))
        begin = int(self._ends[first] - self.counts[first])
        if first == last:
            return self._shard(first)[start - begin : stop - begin]
        # copied one at a time: a view of each would keep every one of their files open
        out = np.empty(stop - start, self.dtype)
        for number in range(first, last + 1):
            end = begin + int(self.counts[number])
            low, high = max(start, begin), min(stop, end)
            out[low - start : high - start] = self._shard(number)[low - begin : high - begin]
            begin = end
        return out

    def _shard(self, number: int) -> np.ndarray:
        self._reads += 1
        if self._reads % READS_BETWEEN_RELEASES == 0:
            self._release()
        if number not in self._maps:
            if len(self._maps) >= self._mapped_at_most:
                self._maps.pop(next(iter(self._maps)))  # the one mapped first
            count, dtype = int(self.counts[number]), self.dtype
            self._maps[number] = _map(self.paths[number], count, dtype)
        self._touched.add(number)
        return self._maps[number][0]

    def _release(self) -> None:
        """Releases the mapped pages that were read; they stay in the system's page cache."""
        for number in self._touched & self._maps.keys():
            if hasattr(mmap, "MADV_DONTNEED"):
                self._maps[number][1].madvise(mmap.MADV_DONTNEED)
            else:
                del self._maps[number]
        self._touched.clear()
