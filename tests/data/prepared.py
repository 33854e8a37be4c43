"""What tests of prepared data share: documents in every format, and what was written read back
with none of the code under test."""

import gzip
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest


def gpt2_files() -> Path:
    """The folder of GPT-2's two files; without them the test is skipped."""
    folder = Path(os.environ.get("FASTGPT_DATA", "data"))
    missing = [name for name in ("encoder.json", "vocab.bpe") if not (folder / name).is_file()]
    if missing:
        pytest.skip(f"FASTGPT_DATA has no {' and no '.join(missing)}")
    return folder


def zst_frame(data: bytes) -> bytes:
    """One frame of Zstandard."""
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKERS = {".gz": gzip.compress, ".zst": zst_frame}


def write_documents(
    path: Path, texts: Sequence[str | None], *, separator: str = "", field: str = "text"
) -> Path:
    """A file of documents in the format that its name says: JSON lines, Parquet, else a text."""
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table({"id": list(range(len(texts))), field: texts})
        parquet.write_table(table, path, row_group_size=3 if len(texts) < 1000 else 1000)
        return path
    if any(suffix in (".jsonl", ".ndjson", ".json") for suffix in path.suffixes):
        lines = [json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)]
        data = "".join(lines).encode()
    else:
        data = separator.join(text or "" for text in texts).encode()
    if packer := PACKERS.get(path.suffix):
        # in two parts: what other programs append to is read to its end
        data = packer(data[: len(data) // 2]) + packer(data[len(data) // 2 :])
    path.write_bytes(data)
    return path


def read_ids(path: Path) -> np.ndarray:
    """The token ids of an llm.c shard, by its description alone."""
    data = path.read_bytes()
    magic, version, count = struct.unpack_from("<3i", data)
    dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[magic, version]
    assert not any(data[12:1024])
    ids = np.frombuffer(data, dtype, offset=1024)
    assert ids.size == count
    return ids


def split_ids(folder: Path, split: str) -> np.ndarray:
    """All ids of a split, in the order of its shards' names."""
    return np.concatenate([read_ids(path) for path in sorted(folder.glob(f"{split}_*.bin"))])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
