"""Writes the files of a prepared directory on all cores, in bounded memory.

One thread reads; a pool of threads tokenizes (the tokenizers release the GIL); results are written
in the order of reading, so the bytes do not depend on the number of threads. The manifest is
written last.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from fastgpt.data.corpus import FORMAT_VERSION, MANIFEST, SPLITS
from fastgpt.data.reading import UTF_8, Source, TextChunk, read_chunks
from fastgpt.data.shards import HEADER_BYTES, MAX_TOKENS, shard_header, token_dtype
from fastgpt.data.tokenizers import SIZED, TOKENIZER_FILE, ByteTokenizer, Tokenizer, make_tokenizer
from fastgpt.errors import UserError, counted
from fastgpt.files import cores, sha256_of, sync, write_atomically

Report = Callable[[int], None]
"""Function that is called after each batch with the number of tokens so far."""
BATCH_CHARACTERS = 2**19
"""Number of characters that one thread tokenizes at a time."""
LEARNT_CHARACTERS = 10**8
"""Number of characters, from the beginning of a source, that bpe and wordpiece are trained on:
their memory grows with the distinct words."""
TAIL_FRACTION, DOCUMENT_FRACTION = 0.1, 0.005
"""Default fractions held out of a text, and of a set of documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Settings of a preparation: flags of `python -m fastgpt.prepare`, which shows their texts."""

    tokenizer: str = "auto"
    """Tokenizer: auto, bytes, chars, gpt2, bpe or wordpiece. It may also be the path of a
    tokenizer.json; bpe and wordpiece are trained on the source. `auto` uses chars for shakespeare,
    bytes for other text and gpt2 for sets of documents."""
    vocab_size: int | None = None
    """Vocabulary size of a bpe or wordpiece tokenizer. By default it is 32,768. The tokenizer
    learns from the first 100 million characters."""
    val_fraction: float | None = None
    """Fraction held out for validation; by default 0.1 of a text or 0.005 of a set of documents. It
    is between 0 and 1: of a text the end, of documents those chosen by their hash. Files, folders
    and splits named train and validation keep their split."""
    separator: str | None = None
    r"""Text between the documents of a text file, such as '\n'. Without it a file is one
    document."""
    field: str = "text"
    """JSON field, or column of Parquet or Arrow, with the text."""
    encoding: str = UTF_8
    """Encoding of text files, for example cp1252. Every text encoding of Python is accepted."""
    shard_tokens: int = 100_000_000
    """Number of tokens in each shard but the last."""

    def __post_init__(self) -> None:
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise UserError(f"--val-fraction is {self.val_fraction}: expected a fraction in (0, 1)")
        if not 1 <= self.shard_tokens <= MAX_TOKENS:
            raise UserError(f"--shard-tokens is {self.shard_tokens}: expected 1 to {MAX_TOKENS:,}")

    def resolved(self, source: Source) -> "PrepareOptions":
        """Returns the settings with the defaults that depend on the source."""
        tokenizer, fraction = self.tokenizer, self.val_fraction
        if tokenizer == "auto":
            plain = "chars" if source.name == "shakespeare" else ByteTokenizer.kind
            tokenizer = plain if source.plain else "gpt2"
        if fraction is None:
            fraction = TAIL_FRACTION if source.plain else DOCUMENT_FRACTION
        return replace(self, tokenizer=tokenizer, val_fraction=fraction)


# --- batches -------------------------------------------------------------------------------------


def batches(source: Source, *, raw: bool, tail_starts: int | None) -> Iterator[list[TextChunk]]:
    """Yields lists of chunks of about `BATCH_CHARACTERS` characters, each tokenized by one thread.

    Args:
        raw: see `read_chunks`.
        tail_starts: length of the text before the held-out tail; None: files or hashes decide.
    """
    batch, size, length = [], 0, 0
    for chunk in read_chunks(source, raw=raw):
        batch += [chunk] if tail_starts is None else _split(chunk, max(0, tail_starts - length))
        size, length = size + len(chunk.text), length + len(chunk.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _split(chunk: TextChunk, cut: int) -> list[TextChunk]:
    """Cuts `chunk` where the held-out tail begins."""
    parts = (
        replace(chunk, text=chunk.text[:cut], split="train"),
        replace(chunk, text=chunk.text[cut:], split="val", begins=chunk.begins and cut == 0),
    )
    return [part for part in parts if part.text]


def encode(
    batch: list[TextChunk], tokenizer: Tokenizer, *, val_fraction: float, ends_documents: bool
) -> tuple[dict[str, tuple[np.ndarray, int, int]], bytes]:
    """Tokenizes a batch, with an end-of-text token before each document if the tokenizer has one.

    Args:
        val_fraction: fraction of documents held out, if their hash decides.
        ends_documents: without an end-of-text token, make each document end in a newline.
    Returns:
        What `ShardWriter.append` takes, by split, and the sha256 of the texts.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    eot = np.array([x for x in [tokenizer.eot_id] if x is not None], dtype)
    found = {split: [eot[:0]] for split in SPLITS}
    num_bytes, documents = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    digest = hashlib.sha256()
    for chunk in batch:
        text = cast(Any, chunk.text)  # bytes for the bytes tokenizer only
        data = chunk.text if isinstance(chunk.text, bytes) else chunk.text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
        split = chunk.split or SPLITS[held_out(data, val_fraction)]
        if ends_documents and not eot.size and not data.endswith(b"\n"):
            text, data = text + "\n", data + b"\n"
        found[split] += [eot[: int(chunk.begins)], tokenizer.encode(text)]
        num_bytes[split] += len(data)
        documents[split] += chunk.begins
    encoded = {
        split: (np.concatenate(ids), num_bytes[split], documents[split])
        for split, ids in found.items()
    }
    return encoded, digest.digest()


def held_out(document: bytes, fraction: float) -> bool:
    """Decides by its hash if a document is held out, so that all copies are treated alike."""
    draw = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") / 2**64
    return draw < fraction


# --- the directory -------------------------------------------------------------------------------


class ShardWriter:
    """Appends tokens to the shards of one split: each but the last holds `shard_tokens`.

    A shard gets its header when all tokens have been written.
    """

    def __init__(self, out: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self.out, self.split, self.dtype, self.shard_tokens = out, split, dtype, shard_tokens
        self.tokens, self.num_bytes, self.documents = 0, 0, 0

    def _path(self, number: int) -> Path:
        return self.out / f"{self.split}_{number:06d}.bin"

    def append(self, ids: np.ndarray, num_bytes: int, documents: int) -> None:
        """Writes tokens (N,) behind those so far.

        Args:
            ids: uint16 or uint32.
            num_bytes: bytes of UTF-8 that they stand for.
            documents: number of documents that begin.
        """
        self.num_bytes += num_bytes
        self.documents += documents
        while ids.size:
            number, before = divmod(self.tokens, self.shard_tokens)
            now, ids = np.split(ids, [self.shard_tokens - before])
            with self._path(number).open("ab") as file:
                file.write(now.data if before else bytes(HEADER_BYTES) + now.tobytes())
            self.tokens += now.size

    def finish(self) -> dict[str, Any]:
        """Completes the shards, and returns the split's entry in the manifest."""
        with ThreadPoolExecutor(cores()) as pool:
            shards = [*pool.map(self._complete, range(-(-self.tokens // self.shard_tokens)))]
        counts = {"tokens": self.tokens, "bytes": self.num_bytes, "documents": self.documents}
        return {**counts, "shards": shards}

    def _complete(self, number: int) -> dict[str, Any]:
        path, before = self._path(number), number * self.shard_tokens
        count = min(self.shard_tokens, self.tokens - before)
        with path.open("r+b") as file:
            file.write(shard_header(count, self.dtype))
            sync(file)
        return {"file": path.name, "tokens": count, "sha256": sha256_of(path)}


def scan(source: Source, *, raw: bool) -> tuple[int, str]:
    """Reads a whole text to find its length and hash.

    Returns:
        Its length, in bytes if it is read raw, else in characters; and the sha256 of its bytes.
    """
    length, digest = 0, hashlib.sha256()
    for chunk in read_chunks(source, raw=raw):
        length += len(chunk.text)
        digest.update(chunk.text if isinstance(chunk.text, bytes) else chunk.text.encode())
    return length, digest.hexdigest()


def write_directory(
    source: Source,
    settings: PrepareOptions,
    out: Path,
    *,
    workers: int | None = None,
    report: Report = lambda _: None,
) -> None:
    """Tokenizes a source into the empty directory `out`.

    Args:
        settings: resolved for the source.
        workers: threads that tokenize; None: one for each core this process may use. The bytes
            written do not depend on it.
    Raises:
        UserError: the source, the tokenizer or the split cannot work.
    """
    kind, fraction, plain = settings.tokenizer, settings.val_fraction, source.plain
    assert fraction is not None, "resolved"
    raw, tail_starts, sha256 = kind == ByteTokenizer.kind, None, None
    if source.split == "tail":
        length, sha256 = scan(source, raw=raw)
        tail_starts = int(length * (1 - fraction))
    texts = partial(_texts, source, sized=kind in SIZED)
    tokenizer = make_tokenizer(kind, texts, vocab_size=settings.vocab_size)
    tokenizer.save(out)
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {x: ShardWriter(out, x, dtype, settings.shard_tokens) for x in SPLITS}
    digest = ""
    tokenize = partial(encode, tokenizer=tokenizer, val_fraction=fraction, ends_documents=not plain)
    todo = batches(source, raw=raw, tail_starts=tail_starts)
    total = 0
    for encoded, hashed in _in_order(tokenize, todo, workers or cores()):
        for split, part in encoded.items():
            writers[split].append(*part)
        # a chain of sha256 over the batches
        digest = hashlib.sha256(digest.encode() + hashed).hexdigest()
        total = sum(writer.tokens for writer in writers.values())
        report(total)
    for split, purpose, change in ("train", "train", "smaller"), ("val", "validate", "larger"):
        if writers[split].tokens < 2:
            raise UserError(
                f"a validation fraction of {fraction} of {source.name} ({counted(total, 'token')})"
                f" leaves nothing to {purpose} on: use more text or a {change} --val-fraction"
                " of fastgpt.prepare (train.py: --data.val-fraction)"
            )
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": source.name,
        "sha256": sha256 or digest,
        "python": source.python,
        "request": {"source": source.given, **asdict(settings)},
        "files": len(source.files),
        "held_out": source.split,
        "tokenizer": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "eot_id": tokenizer.eot_id,
        "tokenizer_sha256": sha256_of(out / TOKENIZER_FILE),
        "val_fraction": None if source.split == "named" else fraction,
        "splits": {split: writer.finish() for split, writer in writers.items()},
    }
    write_atomically(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def _texts(source: Source, *, sized: bool) -> Iterator[str]:
    """Yields the texts that a tokenizer is trained on."""
    length = 0
    for chunk in read_chunks(source):
        assert isinstance(chunk.text, str)
        yield chunk.text
        length += len(chunk.text)
        if sized and length >= LEARNT_CHARACTERS:
            break
    if not source.plain:
        yield "\n"  # ends documents of tokenizers without an end-of-text token, such as chars


def _in_order(
    tokenize: Callable[[list[TextChunk]], Any], todo: Iterator[list[TextChunk]], workers: int
) -> Iterator[Any]:
    """Yields what `tokenize` makes of the batches, in their order.

    Twice as many batches as threads are in work: enough that no thread waits for the reader, few
    enough to be held in memory.
    """
    pending: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for batch in todo:
            pending.append(pool.submit(tokenize, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        for encoded in pending:
            yield encoded.result()
