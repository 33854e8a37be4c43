"""Writes a prepared directory on all cores, in bounded memory, and resumable.

One thread reads; a pool of threads tokenizes (the tokenizers release the GIL); results are written
in the order of reading, so the bytes do not depend on the number of threads. Every few seconds the
shards are synced and `progress.json` records their lengths: after an interruption at any moment,
the shards are truncated to that point and writing resumes there. The manifest is written last.
"""

import itertools
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastgpt.data.corpus import FORMAT_VERSION, MANIFEST, SPLITS
from fastgpt.data.prepare.batches import Encoded, Place, batches, encode, held_out
from fastgpt.data.prepare.documents import read_pieces, scan, source_size
from fastgpt.data.prepare.request import (
    PROGRESS,
    Progress,
    Request,
    load_progress,
)
from fastgpt.data.prepare.text import UTF_8
from fastgpt.data.shards import HEADER_BYTES, shard_header, token_dtype
from fastgpt.data.tokenizers import (
    SIZED,
    TOKENIZER_FILE,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from fastgpt.errors import UserError, counted, writing
from fastgpt.files import cores, sha256_of, sync, write_atomically

Report = Callable[[int, float], None]
LEARNT_CHARACTERS = 10**8
"""Number of characters, from the beginning of a source, that bpe and wordpiece are trained on:
their memory grows with the distinct words."""

MOST_BYTES_PER_TOKEN = 8
"""Upper bound of the mean number of bytes of text per token."""


def write_directory(
    request: Request,
    out: Path,
    *,
    workers: int | None = None,
    report: Report | None = None,
    save_every_s: float = 5.0,
) -> None:
    """Carries out a request in the directory `out`, or resumes an earlier call there.

    Args:
        out: a directory for this request alone.
        workers: threads that tokenize; None: one for each core this process may use. The bytes
            written do not depend on it.
        report: called after each batch with the number of tokens so far, and the share of the
            source that has been read.
        save_every_s: seconds between two points to resume from.
    Raises:
        UserError: the source, the tokenizer or the split cannot work, or the disk is full; the work
            so far is kept for the next call.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for path in out.glob(".*.json-*"):
            path.unlink()  # temporary file of a killed process
        progress = load_progress(out, request)
        if progress is not None and (out / MANIFEST).exists():
            return  # complete, but not renamed yet
        (out / MANIFEST).unlink(missing_ok=True)
        _Directory(request, out, progress, workers or cores(), report, save_every_s).run()


def check_space(request: Request, out: Path) -> None:
    """Raises `UserError` if the disk has no room for the smallest possible number of tokens."""
    files, encoding = request.source.files, request.source.encoding
    texts = sum(os.path.getsize(file.path) for file in files if file.format == "text")
    raw = request.tokenizer == ByteTokenizer.kind and encoding == UTF_8
    least = 2 * texts / (1 if raw else MOST_BYTES_PER_TOKEN)
    free = shutil.disk_usage(out).free
    if least > free:
        raise UserError(
            f"{out} needs at least {least / 1e6:,.0f} MB, but {free / 1e6:,.0f} MB are free there"
        )


class _Directory:
    """Prepared directory that is being written; does the work of `write_directory`."""

    def __init__(
        self,
        request: Request,
        out: Path,
        progress: Progress | None,
        workers: int,
        report: Report | None,
        save_every_s: float,
    ) -> None:
        self.request, self.source, self.out = request, request.source, out
        self.workers, self.report, self.save_every_s = workers, report, save_every_s
        self.facts = request.facts()
        self.raw = request.tokenizer == ByteTokenizer.kind
        self.before = list(itertools.accumulate(source_size(self.source), initial=0))
        self.tail_starts, self.sha256 = None, None
        if progress is None:
            check_space(request, out)
        if self.source.split == "tail":
            length, self.sha256 = scan(self.source, raw=self.raw)
            self.tail_starts = int(length * (1 - request.val_fraction))
            unit = "byte" if self.raw else "character"
            self._check_split(self.tail_starts, length - self.tail_starts, least=2, unit=unit)
        elif self.source.split == "hash" and progress is None:
            self._check_split(*self._first_documents(), least=1, unit="document")
        self.tokenizer = self._tokenizer(fresh=progress is None)
        self.progress = progress or Progress()
        dtype = token_dtype(self.tokenizer.vocab_size)
        self.writers = {
            split: ShardWriter(out, split, dtype, request.shard_tokens, self.progress.tokens[split])
            for split in SPLITS
        }
        self.saved = time.monotonic()

    def _tokenizer(self, *, fresh: bool) -> Tokenizer:
        """Loads the tokenizer of the earlier call, else makes one and trains it if necessary."""
        if not fresh:
            return load_tokenizer(self.out / TOKENIZER_FILE)
        tokenizer = make_tokenizer(
            self.request.tokenizer, self._texts, vocab_size=self.request.vocab_size
        )
        tokenizer.save(self.out / TOKENIZER_FILE)
        return tokenizer

    def _first_documents(self) -> tuple[int, int]:
        """Reads documents until each split has one; returns the number in each split."""
        counts = [0, 0]
        for piece in read_pieces(self.source, raw=False):
            assert isinstance(piece.text, str)
            counts[held_out(piece.text.encode(), self.request.val_fraction)] += 1
            if all(counts):
                break
        return counts[0], counts[1]

    def _check_split(self, train: int, val: int, *, least: int, unit: str) -> None:
        """Raises `UserError` for a split that leaves too little to train or to validate on."""
        total, advice = train + val, f"expected at least {2 * least} {unit}s"
        fraction = "--val-fraction (train.py: --data.val-fraction)"
        for found, verb, change in ((train, "train on", "smaller"), (val, "validate on", "larger")):
            if found < least:
                raise UserError(
                    f"a validation fraction of {self.request.val_fraction} of {self.source.name}"
                    f" ({counted(total, unit)}) leaves nothing to {verb}:"
                    f" {advice if total < 2 * least else f'use more text or a {change} {fraction}'}"
                )

    def _texts(self) -> Iterator[str]:
        length, sized = 0, self.request.tokenizer in SIZED
        for piece in read_pieces(self.source, raw=False):
            assert isinstance(piece.text, str)
            yield piece.text
            length += len(piece.text)
            if sized and length >= LEARNT_CHARACTERS:
                break
        if not self.source.plain:
            yield "\n"  # ends documents of tokenizers without an end-of-text token, such as chars

    def run(self) -> None:
        self._save()  # a trained tokenizer, if nothing else yet
        self._report()
        pending: deque[tuple[Future[Encoded], Place]] = deque()
        tokenize = partial(
            encode,
            tokenizer=self.tokenizer,
            val_fraction=self.request.val_fraction,
            ends_documents=not self.source.plain,
        )
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                for parts, place in batches(
                    self.source, self.progress.place, raw=self.raw, tail_starts=self.tail_starts
                ):
                    pending.append((pool.submit(tokenize, parts), place))
                    # enough that no thread waits for the reader, few enough to be held in memory
                    if len(pending) > 2 * self.workers:
                        self._write(*pending.popleft())
                while pending:
                    self._write(*pending.popleft())
            finally:
                pool.shutdown(cancel_futures=True)
                self._save()
        self._finish()

    def _write(self, encoded: Future[Encoded], place: Place) -> None:
        result = encoded.result()
        for split, tokens in result.tokens.items():
            self.writers[split].append(tokens)
        self.progress = self.progress.after(result, place)
        self._report()
        if time.monotonic() - self.saved >= self.save_every_s:
            self._save()

    def _report(self) -> None:
        place = self.progress.place
        behind = self.before[place.file] + place.done
        if self.report is not None:
            self.report(sum(self.progress.tokens.values()), behind / max(1, self.before[-1]))

    def _save(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        content = {"request": self.facts, "progress": asdict(self.progress)}
        write_atomically(self.out / PROGRESS, json.dumps(content).encode())
        self.saved = time.monotonic()

    def _finish(self) -> None:
        try:
            self._check_split(**self.progress.tokens, least=2, unit="token")
        except UserError:
            (self.out / PROGRESS).unlink()  # nothing to resume: another fraction is due
            raise
        splits = {split: self._complete(split) for split in SPLITS}
        content = json.dumps(self._manifest(splits), indent=1) + "\n"
        write_atomically(self.out / MANIFEST, content.encode())

    def _complete(self, split: str) -> dict[str, Any]:
        """Completes a split's shards, and returns its entry in the manifest."""
        paths = self.writers[split].finish()
        with ThreadPoolExecutor(self.workers) as pool:
            sums = pool.map(sha256_of, paths)
            shards = [
                {"file": path.name, "tokens": count, "sha256": found}
                for path, count, found in zip(paths, self.writers[split].counts(), sums)
            ]
        progress = self.progress
        return {
            "tokens": progress.tokens[split],
            "bytes": progress.num_bytes[split],
            "documents": progress.documents[split],
            "shards": shards,
        }

    def _manifest(self, splits: dict[str, Any]) -> dict[str, Any]:
        source = self.source
        return {
            "format_version": FORMAT_VERSION,
            "name": source.name,
            "sha256": self.sha256 or self.progress.digest,
            "python": source.python,
            "source": {
                "given": source.given,
                "files": len(source.files),
                "skipped_files": len(source.skipped),
                "encoding": source.encoding,
                "revision": source.revision,
                "held_out": source.split,
            },
            "tokenizer": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "eot_id": self.tokenizer.eot_id,
            "tokenizer_sha256": sha256_of(self.out / TOKENIZER_FILE),
            "val_fraction": None if source.split == "named" else self.request.val_fraction,
            "splits": splits,
        }


class ShardWriter:
    """Appends tokens to the shards of one split: each but the last holds `shard_tokens`.

    The files depend only on the tokens appended so far, not on the sizes of the parts or on
    interruptions. A shard gets its header when it is complete.

    Args:
        split: `train` or `val`, the beginning of the file names.
        tokens: number of tokens already written; the files are truncated to them.
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
        """Truncates the shards to the first `tokens` tokens."""
        full, rest = divmod(tokens, self.shard_tokens)
        for path in self.out.glob(f"{self.split}_*.bin"):
            if path.name > self._path(full).name or (path == self._path(full) and not rest):
                path.unlink()
        self.tokens = tokens
        for number, count in enumerate(self.counts()):
            self._check_size(number, count)
        if rest:
            self.file = self._path(full).open("r+b")
            self.file.write(bytes(HEADER_BYTES))  # the shard is no longer complete
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
        """Writes the header, which completes the shard, and closes the file."""
        assert self.file is not None
        self.file.seek(0)
        self.file.write(shard_header(count, self.dtype))
        self.sync()
        file, self.file = self.file, None  # a stop in between finds no closed file
        file.close()

    def sync(self) -> None:
        if self.file is not None:
            sync(self.file)

    def counts(self) -> list[int]:
        """Returns the number of tokens in each shard."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * full + [rest] * (rest > 0)

    def finish(self) -> list[Path]:
        """Completes the last shard, and returns the paths of all, in order."""
        if self.file is not None:
            self._close(self.tokens % self.shard_tokens)
        return [self._path(number) for number in range(len(self.counts()))]
