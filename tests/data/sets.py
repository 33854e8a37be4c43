"""Small datasets in every format, and readers that share no code with the program under test."""

import bz2
import gzip
import json
import lzma
import os
import random
import struct
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from fastgpt.data.preparation import prepare
from fastgpt.data.tokenizers import Tokenizer, make_tokenizer

WORDS = "the cat sat on a mat and that dog ran to its log while one old hen hid"


def gpt2_files() -> Path:
    """Folder of GPT-2's two files; without them the test is skipped."""
    folder = Path(os.environ.get("FASTGPT_DATA", "data"))
    missing = [name for name in ("encoder.json", "vocab.bpe") if not (folder / name).is_file()]
    if missing:
        pytest.skip(f"FASTGPT_DATA has no {' and no '.join(missing)}")
    return folder


LEARNT = [
    "the cat sat on the mat, and the dog sat on the log. " * 5,
    "The naïve café: 東京 東京, 東京! \U0001f600\U0001f600 it's 1234 1234\n\n\n    x\n" * 3,
    "".join(f"word{i} other{i % 7}\n" * 2 for i in range(300)),
    " ".join(map(chr, range(0x3B1, 0x451))),  # equally rare, and more than WordPiece has room for
]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Returns a tokenizer of a kind, trained on the text `LEARNT` if it needs training."""
    if kind == "gpt2":
        gpt2_files()
    return make_tokenizer(kind, lambda: LEARNT, vocab_size={"bpe": 500, "wordpiece": 400}.get(kind))


def texts(count: int, longest: int = 12, seed: int = 0) -> list[str]:
    """Makes `count` texts of 1 to `longest` words, all different."""
    draw, words = random.Random(seed), WORDS.split()
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [f"{i} " + " ".join(draw.choices(words, k=n)) for i, n in enumerate(lengths)]


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": partial(pyarrow.Codec("zstd").compress, asbytes=True),
}


def write_documents(
    path: Path, texts: Sequence[str | None], *, separator: str = "", field: str = "text"
) -> Path:
    """Writes documents in the format of the file's name: JSON lines, Parquet, else a text."""
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    rows = 3 if len(texts) < 1000 else 1000
    if path.suffix == ".arrow":
        new = pyarrow.ipc.new_file if ".feather" in path.suffixes else pyarrow.ipc.new_stream
        with new(path, table.schema) as file:
            file.write_table(table, rows)
        return path
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return path
    if {".jsonl", ".ndjson"} & {*path.suffixes}:
        lines = [json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)]
        data = "".join(lines).encode()
    else:
        data = separator.join(text or "" for text in texts).encode()
    if packer := PACKERS.get(path.suffix):
        # in two parts: what other programs append to is read to its end
        data = packer(data[: len(data) // 2]) + packer(data[len(data) // 2 :])
    path.write_bytes(data)
    return path


def prepared(out: Path, documents: list[str], tokenizer: str = "bpe", **options) -> Path:
    """Prepares documents in `out`; the tokenizer bpe has the 256 bytes and the end of a text."""
    source = write_documents(out.with_name(f"{out.name}.jsonl"), documents)
    if tokenizer == "bpe":
        options["vocab_size"] = 257
    return prepare(str(source), out, tokenizer=tokenizer, val_fraction=0.2, **options)


FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
"""Magic number and version of llm.c's two formats, by token type, from their description alone."""


def shard_bytes(ids, kind="uint16", magic=None, version=None, count=None) -> bytes:
    """Builds a shard in llm.c's format; arguments replace numbers of the header by wrong ones."""
    known_magic, known_version = FORMATS[kind]
    header = struct.pack(
        "<3i", magic or known_magic, version or known_version, len(ids) if count is None else count
    )
    return header.ljust(1024, b"\0") + np.asarray(ids).astype(f"<u{int(kind[4:]) // 8}").tobytes()


def write_shard(path: Path, ids, kind="uint16") -> Path:
    path.write_bytes(shard_bytes(ids, kind))
    return path


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flips a bit of a file; a second call repairs it."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def same_times(path: Path, status: os.stat_result) -> None:
    """Restores a file's old modification time."""
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def split_ids(folder: Path, split: str) -> np.ndarray:
    """Reads all ids of a split, in the order of its shards' names."""
    kinds = {numbers: kind for kind, numbers in FORMATS.items()}
    found = []
    for path in sorted(folder.glob(f"{split}_*.bin")):
        data = path.read_bytes()
        found.append(np.frombuffer(data, kinds[struct.unpack_from("<2i", data)], offset=1024))
        assert data == shard_bytes(found[-1], found[-1].dtype.name)
    return np.concatenate(found)


def contents(folder: Path) -> dict[str, bytes]:
    """Reads every file below a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
