"""Writes a prepared directory on all cores, in bounded memory, and resumable.

One thread reads; a pool of threads tokenizes (the tokenizers release the GIL); results are written
in the order of reading, so the bytes do not depend on the number of threads. Every few seconds the
shards are synced and `progress.json` records their lengths: after an interruption at any moment,
the shards are truncated to that point, the texts before it are read without being tokenized again,
and writing goes on. The manifest is written last.
"""

import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fastgpt.data.batches import Encoded, batches, encode
from fastgpt.data.corpus import FORMAT_VERSION, MANIFEST, SPLITS
from fastgpt.data.reading import Source, read_pieces, source_size
from fastgpt.data.request import PROGRESS, Progress, Request, check_same, load_progress
from fastgpt.data.shard_writer import ShardWriter
from fastgpt.data.shards import token_dtype
from fastgpt.data.tokenizers import (
    SIZED,
    TOKENIZER_FILE,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from fastgpt.errors import UserError, counted, writing
from fastgpt.files import cores, sha256_of, write_atomically

Report = Callable[[int, float], None]
LEARNT_CHARACTERS = 10**8
"""Number of characters, from the beginning of a source, that bpe and wordpiece are trained on:
their memory grows with the distinct words."""


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
        facts, (before, done) = request.facts(), load_progress(out)
        if any(done.get("tokens", {}).values()):
            check_same(out, before, facts)
        if before == facts and (out / MANIFEST).exists():
            return  # complete, but not renamed yet
        (out / MANIFEST).unlink(missing_ok=True)
        goes_on = before == facts and "batches" in done
        directory = _Directory(request, out, Progress(**done) if goes_on else None, report)
        directory.tokenize(workers or cores(), save_every_s)
        directory.finish()


def scan(source: Source, *, raw: bool) -> tuple[int, str]:
    """Reads a whole text to find its length and hash.

    Returns:
        Its length, in bytes if it is read raw, else in characters; and the sha256 of its bytes.
    """
    length, digest = 0, hashlib.sha256()
    for piece in read_pieces(source, raw=raw):
        length += len(piece.text)
        digest.update(piece.text if isinstance(piece.text, bytes) else piece.text.encode())
    return length, digest.hexdigest()


class _Directory:
    """Prepared directory that is being written; does the work of `write_directory`."""

    def __init__(
        self, request: Request, out: Path, progress: Progress | None, report: Report | None
    ) -> None:
        self.source, self.settings, self.facts = request.source, request.settings, request.facts()
        self.out, self.report = out, report
        self.raw = self.settings.tokenizer == ByteTokenizer.kind
        self.size = max(1, source_size(self.source))
        self.tail_starts, self.sha256 = None, None
        if self.source.split == "tail":
            length, self.sha256 = scan(self.source, raw=self.raw)
            self.tail_starts = int(length * (1 - self.fraction))
        self.tokenizer = self._new_tokenizer() if progress is None else load_tokenizer(out)
        self.progress = progress or Progress()
        dtype, tokens = token_dtype(self.tokenizer.vocab_size), self.progress.tokens
        self.writers = {
            split: ShardWriter(out, split, dtype, self.settings.shard_tokens, tokens[split])
            for split in SPLITS
        }

    @property
    def fraction(self) -> float:
        assert self.settings.val_fraction is not None, "made by Request.of"
        return self.settings.val_fraction

    def _new_tokenizer(self) -> Tokenizer:
        kind, size = self.settings.tokenizer, self.settings.vocab_size
        tokenizer = make_tokenizer(kind, self._texts, vocab_size=size)
        tokenizer.save(self.out)
        return tokenizer

    def _texts(self) -> Iterator[str]:
        length, sized = 0, self.settings.tokenizer in SIZED
        for piece in read_pieces(self.source):
            assert isinstance(piece.text, str)
            yield piece.text
            length += len(piece.text)
            if sized and length >= LEARNT_CHARACTERS:
                break
        if not self.source.plain:
            yield "\n"  # ends documents of tokenizers without an end-of-text token, such as chars

    def tokenize(self, workers: int, save_every_s: float) -> None:
        """Reads the source, and writes the tokens of the batches that were not written yet."""
        self._save()  # a trained tokenizer, if nothing else yet
        self._report(0)
        saved = time.monotonic()
        with ThreadPoolExecutor(workers) as pool:
            for result, done in self._encoded(pool, 2 * workers):
                for split, tokens in result.tokens.items():
                    self.writers[split].append(tokens)
                self.progress.add(result)
                self._report(done)
                if time.monotonic() - saved >= save_every_s:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def _encoded(self, pool: ThreadPoolExecutor, most: int) -> Iterator[tuple[Encoded, int]]:
        """Yields the tokens of the batches in order, while `most` more of them are in work."""
        pending: deque[tuple[Future[Encoded], int]] = deque()
        tokenize = partial(
            encode,
            tokenizer=self.tokenizer,
            val_fraction=self.fraction,
            ends_documents=not self.source.plain,
        )
        found = batches(self.source, raw=self.raw, tail_starts=self.tail_starts)
        for batch in itertools.islice(found, self.progress.batches, None):
            pending.append((pool.submit(tokenize, batch), batch[-1].done))
            # enough that no thread waits for the reader, few enough to be held in memory
            if len(pending) > most:
                encoded, done = pending.popleft()
                yield encoded.result(), done
        for encoded, done in pending:
            yield encoded.result(), done

    def _save(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        content = {"request": self.facts, "progress": asdict(self.progress)}
        write_atomically(self.out / PROGRESS, json.dumps(content).encode())

    def _report(self, done: int) -> None:
        if self.report is not None:
            self.report(sum(self.progress.tokens.values()), done / self.size)

    def finish(self) -> None:
        """Completes the shards, and writes the manifest."""
        tokens = self.progress.tokens
        for split, purpose, change in (
            ("train", "train", "smaller"),
            ("val", "validate", "larger"),
        ):
            if tokens[split] < 2:
                (self.out / PROGRESS).unlink()  # nothing to resume: another fraction is due
                raise UserError(
                    f"a validation fraction of {self.fraction} of {self.source.name}"
                    f" ({counted(sum(tokens.values()), 'token')}) leaves nothing to {purpose} on:"
                    f" use more text or a {change} --val-fraction (train.py: --data.val-fraction)"
                )
        splits = {split: self._complete(split) for split in SPLITS}
        content = json.dumps(self._manifest(splits), indent=1) + "\n"
        write_atomically(self.out / MANIFEST, content.encode())

    def _complete(self, split: str) -> dict[str, Any]:
        """Completes a split's shards, and returns its entry in the manifest."""
        paths, counts = self.writers[split].finish(), self.writers[split].counts()
        with ThreadPoolExecutor(cores()) as pool:
            shards = [
                {"file": path.name, "tokens": count, "sha256": found}
                for path, count, found in zip(paths, counts, pool.map(sha256_of, paths))
            ]
        return {
            "tokens": self.progress.tokens[split],
            "bytes": self.progress.num_bytes[split],
            "documents": self.progress.documents[split],
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
            "val_fraction": None if source.split == "named" else self.fraction,
            "splits": splits,
        }
