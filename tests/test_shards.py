import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.errors import UserError
from fastgpt.shards import read_shard, write_atomically, write_shard


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "train_000000.bin"
    write_shard(path, np.arange(100))
    return path


def llmc_bytes(ids, magic=20240520, version=1, count=None):
    """The format, written down a second time with nothing but struct."""
    header = struct.pack("<3i", magic, version, len(ids) if count is None else count)
    return header.ljust(1024, b"\0") + struct.pack(f"<{len(ids)}H", *ids)


@given(st.lists(st.integers(0, 65_535), min_size=1, max_size=50))
def test_files_are_llmc_files_both_ways(tmp_path_factory, ids):
    path = tmp_path_factory.mktemp("shards") / "x.bin"
    write_shard(path, np.array(ids))
    assert path.read_bytes() == llmc_bytes(ids)
    assert read_shard(path).tolist() == ids


def test_shard_is_mapped_and_read_only(shard):
    tokens = read_shard(shard)
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_strided_and_big_endian_tokens_are_written_in_order(tmp_path):
    tokens = np.arange(20, dtype=">i4")[::2]
    write_shard(tmp_path / "x.bin", tokens)
    assert read_shard(tmp_path / "x.bin").tolist() == tokens.tolist()


@pytest.mark.parametrize("bad", [-1, 65_536])
def test_id_that_does_not_fit_is_named(tmp_path, bad):
    with pytest.raises(UserError, match=rf"x\.bin: token 2 is {bad},"):
        write_shard(tmp_path / "x.bin", np.array([0, 65_535, bad, bad]))
    assert list(tmp_path.iterdir()) == []


def test_empty_shard_is_refused(tmp_path):
    with pytest.raises(UserError, match="not 0"):
        write_shard(tmp_path / "x.bin", np.empty(0, np.uint16))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes, too short"),
        (llmc_bytes([])[:-1], "1023 bytes, too short"),
        (llmc_bytes([1, 2], magic=20240801), "magic 20240801, expected 20240520"),
        (llmc_bytes([1, 2], version=2), "version 2, expected 1"),
        (llmc_bytes([1, 2], count=3), r"promises 3 tokens \(1,030 bytes\), the file has 1,028"),
        (llmc_bytes([1, 2], count=1), "promises 1 tokens"),
        (llmc_bytes([1, 2])[:-1], "the file has 1,027 bytes"),
        (llmc_bytes([]), "promises 0 tokens"),
        (llmc_bytes([], count=-1), "promises -1 tokens"),
    ],
)
def test_damaged_shard_is_named(tmp_path, content, complaint):
    path = tmp_path / "val_000000.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"val_000000\.bin: .*{complaint}"):
        read_shard(path)


def test_missing_shard_is_named(tmp_path):
    with pytest.raises(UserError, match=r"x\.bin: no such shard"):
        read_shard(tmp_path / "x.bin")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(shard, monkeypatch, failing):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space"):
        write_shard(shard, np.arange(5))
    monkeypatch.undo()
    assert read_shard(shard).size == 100
    assert list(shard.parent.iterdir()) == [shard]


def test_file_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("sync"))
    monkeypatch.setattr(os, "replace", lambda *names: calls.append("name") or replace(*names))
    write_atomically(tmp_path / "x", b"one", b"two")
    assert (tmp_path / "x").read_bytes() == b"onetwo"
    assert calls == ["sync", "name", "sync"]  # the file, then its folder
