"""Writes the shards of a split, which can be cut back to any number of tokens."""

from pathlib import Path

import numpy as np

from fastgpt.data.shards import HEADER_BYTES, shard_header
from fastgpt.errors import UserError
from fastgpt.files import sync


class ShardWriter:
    """Appends tokens to the shards of one split: each but the last holds `shard_tokens`.

    The files depend only on the tokens appended so far, not on the sizes of the parts or on
    interruptions. A shard gets its header when it is complete.

    Args:
        split: `train` or `val`, the beginning of the file names.
        tokens: number of tokens already written; the files are truncated to them.
    Raises:
        UserError: a shard is missing or shorter than it was.
    """

    def __init__(
        self, out: Path, split: str, dtype: np.dtype, shard_tokens: int, tokens: int
    ) -> None:
        self.out, self.split, self.dtype, self.shard_tokens = out, split, dtype, shard_tokens
        self.tokens = tokens
        counts = self.counts()
        for path in out.glob(f"{split}_*.bin"):
            if path.name >= self._path(len(counts)).name:
                path.unlink()
        for number, count in enumerate(counts):
            path = self._path(number)
            if not path.exists() or path.stat().st_size < self._end(count):
                raise UserError(f"{path} has lost tokens: remove {out} and start again")
        if counts and counts[-1] < shard_tokens:
            with self._path(len(counts) - 1).open("r+b") as file:
                file.write(bytes(HEADER_BYTES))  # the shard is no longer complete
                file.truncate(self._end(counts[-1]))

    def _path(self, number: int) -> Path:
        return self.out / f"{self.split}_{number:06d}.bin"

    def _end(self, tokens: int) -> int:
        """Returns the byte at which this number of tokens of a shard ends."""
        return HEADER_BYTES + tokens * self.dtype.itemsize

    def append(self, tokens: np.ndarray) -> None:
        """Writes tokens behind those so far."""
        while tokens.size:
            full, before = divmod(self.tokens, self.shard_tokens)
            part, tokens = np.split(tokens, [self.shard_tokens - before])
            with self._path(full).open("r+b" if before else "wb") as file:
                file.seek(self._end(before))
                file.write(part.data)
            self.tokens += part.size
            if self.tokens % self.shard_tokens == 0:
                self._complete(full, self.shard_tokens)

    def _complete(self, number: int, count: int) -> None:
        """Writes the header, which completes a shard."""
        with self._path(number).open("r+b") as file:
            file.write(shard_header(count, self.dtype))
            sync(file)

    def sync(self) -> None:
        """Flushes the tokens so far to the disk."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        if rest:
            with self._path(full).open("r+b") as file:
                sync(file)

    def counts(self) -> list[int]:
        """Returns the number of tokens in each shard."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * full + [rest] * (rest > 0)

    def finish(self) -> list[Path]:
        """Completes the last shard, and returns the paths of all, in order."""
        counts = self.counts()
        if counts and counts[-1] < self.shard_tokens:
            self._complete(len(counts) - 1, counts[-1])
        return [self._path(number) for number in range(len(counts))]
