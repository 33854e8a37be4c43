"""Shards that grow: appended to, cut back to a known length, and completed."""

import os
from pathlib import Path

import numpy as np

from fastgpt.data.shards import HEADER_BYTES, shard_header
from fastgpt.errors import UserError
from fastgpt.storage import sync


class ShardWriter:
    """Appends tokens to the shards of one split: each but the last holds `shard_tokens`.

    What the files hold is a function of the tokens appended so far, however they were cut and
    whatever was appended and lost again. A shard gets its header when it is complete.

    Args:
        out: the folder of the shards.
        split: `train` or `val`, the beginning of their names.
        dtype: `SMALL` or `LARGE`.
        shard_tokens: tokens in a shard.
        tokens: how many are there to go on from; files are cut back to them.
    """

    def __init__(
        self, out: Path, split: str, dtype: np.dtype, shard_tokens: int, tokens: int
    ) -> None:
        self.out, self.split, self.dtype, self.shard_tokens = out, split, dtype, shard_tokens
        self.tokens = 0
        self.file = None
        self._cut_back(tokens)

    def _path(self, number: int) -> Path:
        return self.out / f"{self.split}_{number:06d}.bin"

    def _cut_back(self, tokens: int) -> None:
        """To the first `tokens` tokens, whatever was written after them."""
        full, rest = divmod(tokens, self.shard_tokens)
        for path in self.out.glob(f"{self.split}_*.bin"):
            if path.name > self._path(full).name or (path == self._path(full) and not rest):
                path.unlink()
        self.tokens = tokens
        for number, count in enumerate(self.counts()):
            self._check_size(number, count)
        if rest:
            self.file = self._path(full).open("r+b")
            self.file.write(bytes(HEADER_BYTES))  # it is not whole any more
            self.file.truncate(HEADER_BYTES + rest * self.dtype.itemsize)
            self.file.seek(0, os.SEEK_END)

    def _check_size(self, number: int, count: int) -> None:
        path, least = self._path(number), HEADER_BYTES + count * self.dtype.itemsize
        size = path.stat().st_size if path.exists() else 0
        if size < least or (count == self.shard_tokens and size > least):
            raise UserError(
                f"{path} has {size:,} bytes, not the {least:,} that were written: remove"
                f" {self.out} and start again"
            )

    def append(self, tokens: np.ndarray) -> None:
        while tokens.size:
            full, rest = divmod(self.tokens, self.shard_tokens)
            if self.file is None:
                self.file = self._path(full).open("xb")
                self.file.write(bytes(HEADER_BYTES))
            part, tokens = np.split(tokens, [self.shard_tokens - rest])
            self.file.write(part.data)
            self.tokens += part.size
            if self.tokens % self.shard_tokens == 0:
                self._close(self.shard_tokens)

    def _close(self, count: int) -> None:
        """Writes the header: until then the file is not a shard."""
        assert self.file is not None
        self.file.seek(0)
        self.file.write(shard_header(count, self.dtype))
        self.sync()
        self.file.close()
        self.file = None

    def sync(self) -> None:
        if self.file is not None:
            sync(self.file)

    def counts(self) -> list[int]:
        """Tokens in each shard."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * full + [rest] * (rest > 0)

    def finish(self) -> list[Path]:
        """Completes the last shard; all of them, in order."""
        if self.file is not None:
            self._close(self.tokens % self.shard_tokens)
        return [self._path(number) for number in range(len(self.counts()))]
