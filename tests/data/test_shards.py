"""Shards: headers, many read as one, and verification that finds any damage once."""

import hashlib
import os
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastgpt.data import shards, verify
from fastgpt.data.shards import Tokens
from fastgpt.data.verify import check_once, check_shard, document_starts
from fastgpt.errors import UserError
from fastgpt.files import write_atomically
from tests.data.sets import FORMATS, flip, same_times, shard_bytes, write_shard
from tests.runs import before_each

TOKENS = 4_000
BYTES = 1024 + 2 * TOKENS


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (shard_bytes([])[:-1], "1023 bytes, too short"),
        (shard_bytes([1, 2], magic=7), "magic 7 at byte 0"),
        (shard_bytes([1, 2], version=7), "version 7 at byte 4, expected 1"),
        # uint16 tokens under the header of uint32
        (shard_bytes([1, 2], magic=20240801, version=7), r"2 tokens at byte 8 \(1,032 bytes\)"),
        (shard_bytes([1, 2], count=3), r"3 tokens .* \(1,030 bytes\).* ends at byte 1,028"),
        (shard_bytes([1, 2], count=1), "says 1 token "),
        (shard_bytes([1, 2], "uint32")[:-2], "ends at byte 1,030"),
        (shard_bytes([]), "says 0 tokens"),
        (shard_bytes([], count=-1), "says -1 tokens"),
        (None, "no such shard"),
    ],
)
def test_damaged_shard_is_named(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.bin: .*{complaint}"):
        Tokens([tmp_path / "x.bin"])


def test_shard_that_is_cut_while_in_use_or_of_another_type_is_named(tmp_path):
    tokens = Tokens([write_shard(tmp_path / "x.bin", range(100))])
    os.truncate(tmp_path / "x.bin", 1_101)
    assert tokens[:38].tolist() == [*range(38)]
    with pytest.raises(UserError, match=r"x\.bin ends at byte 1,101: it was cut while in use"):
        tokens[30:39]
    paths = [write_shard(tmp_path / f"{kind}.bin", [1, 2], kind) for kind in FORMATS]
    with pytest.raises(UserError, match=r"holds uint32, but .*uint16\.bin holds uint16"):
        Tokens(paths)
    with pytest.raises(UserError, match="no token shards"):
        Tokens([])


@pytest.fixture(scope="module")
def write_parts(tmp_path_factory):
    def write(ids, cuts, kind="uint16"):
        folder = tmp_path_factory.mktemp("shards")
        bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
        for i, (start, stop) in enumerate(pairwise(bounds)):
            write_shard(folder / f"{i:02}.bin", ids[start:stop], kind)
        tokens = Tokens(sorted(folder.iterdir()))
        assert tokens.counts.tolist() == np.diff(bounds).tolist()
        return tokens

    return write


cuts = st.lists(st.integers(1, 59), max_size=5)


@given(cuts=cuts, size=st.integers(1, 60), kind=st.sampled_from([*FORMATS]), data=st.data())
def test_shards_are_read_as_their_concatenation(write_parts, cuts, size, kind, data):
    ids = np.random.default_rng(0).integers(0, np.iinfo(kind).max, size, endpoint=True)
    tokens = write_parts(ids, cuts, kind)
    assert (len(tokens), tokens.dtype) == (size, kind)
    bound = st.none() | st.integers(-size - 2, size + 2)
    for _ in range(10):
        window = slice(data.draw(bound), data.draw(bound))
        assert tokens[window].tolist() == ids[window].tolist()
        assert tokens[window].dtype == kind


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60), cuts=cuts, block=st.integers(1, 70)
)
@example(ids=[3, 3, 3], cuts=[1], block=1)
def test_documents_begin_at_the_first_token_and_at_each_end_of_text(write_parts, ids, cuts, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "BLOCK_TOKENS", block)
        starts = document_starts(write_parts(ids, cuts), 3)
    expected = [i for i, token in enumerate(ids) if token == 3 or i == 0]
    assert (starts.dtype, starts.tolist()) == (np.int64, expected)


def test_few_shards_are_open_at_a_time(write_parts, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_FILES", 3)
    before = len(os.listdir("/dev/fd"))
    tokens = write_parts(range(60), range(1, 60))
    assert tokens[:].tolist() == [*range(60)]
    check_once(dict.fromkeys(tokens.paths), 60)
    assert document_starts(tokens, 30).tolist() == [0, 30]
    assert len(os.listdir("/dev/fd")) <= before + 3


def test_a_shard_stays_open_while_it_is_read(write_parts, monkeypatch):
    """A read gets its own shard, though another thread opens the next one just before."""
    monkeypatch.setattr(shards, "OPEN_FILES", 1)
    tokens = write_parts([0, 0, 1, 1], [2])
    others = [slice(2, 4)]
    before_each(monkeypatch, os, "pread", lambda *_: others and tokens[others.pop()])
    assert tokens[0:2].tolist() == [0, 0]


def summed(path):
    """Writes a shard of `TOKENS` token ids up to 999; returns its path and its sha256."""
    write_shard(path, np.arange(TOKENS) % 1_000)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@given(byte=st.integers(0, BYTES - 1), bit=st.integers(0, 7))
@example(byte=12, bit=0)  # the first zero of the header
@example(byte=BYTES - 1, bit=7)
def test_any_flipped_bit_is_found(tmp_path_factory, byte, bit):
    path, sha256 = summed(tmp_path_factory.mktemp("shards") / "x.bin")
    check_shard(path, sha256, 1_000)
    flip(path, byte, bit)
    # magic, version and count come first
    said = f": .* at byte {byte // 4 * 4}" if byte < 12 else f" is .*, expected {sha256};"
    with pytest.raises(UserError, match=rf"x\.bin{said}"):
        check_shard(path, sha256, 65_536)


@pytest.mark.parametrize("kind", FORMATS)
def test_id_beyond_the_vocabulary_is_named(tmp_path, kind):
    for position in (0, TOKENS - 1):
        ids = np.full(TOKENS, 299)
        ids[position:] = 300
        path = write_shard(tmp_path / "x.bin", ids, kind)
        with pytest.raises(UserError, match=r"x\.bin has the token id 300, .* ends at 299$"):
            check_shard(path, None, 300)
        check_shard(path, None, 301)


def test_shards_are_read_once_until_they_change(tmp_path, monkeypatch):
    reads, (path, sha256) = [], summed(tmp_path / "train_000003.bin")
    before_each(monkeypatch, verify, "check_shard", lambda path, *_: reads.append(path))
    other = write_shard(tmp_path / "val_000000.bin", range(10))

    def read(vocab_size=1_000):
        reads.clear()
        check_once({path: sha256, other: None}, vocab_size)
        return sorted(reads)

    assert read() == [path, other]
    assert read() == []
    assert read(2_000) == [path, other]  # another vocabulary: another question
    status = other.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert read() == [other]
    write_shard(other, range(11))
    same_times(other, status)
    assert read() == [other]
    flip(path, 5_000)
    for _ in range(2):
        with pytest.raises(UserError, match=r"train_000003\.bin is damaged: its sha256 is"):
            read()
    flip(path, 5_000)
    assert read() == [path]
    assert read() == []


def test_documents_are_looked_for_once_until_a_shard_changes(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "x.bin", [7, 1, 7, 1])
    searches = []
    before_each(monkeypatch, verify, "_blocks", lambda *args: searches.append(args))
    for _ in range(2):
        assert document_starts(Tokens([path]), 7).tolist() == [0, 2]
    assert len(searches) == 1
    assert document_starts(Tokens([path]), 1).tolist() == [0, 1, 3]  # another end of text
    status = path.stat()
    write_shard(path, [7, 1, 1, 7, 1])
    same_times(path, status)
    assert document_starts(Tokens([path]), 7).tolist() == [0, 3]
    assert len(searches) == 3


def test_file_is_synced_before_it_gets_its_name_and_an_old_one_kept(tmp_path, monkeypatch):
    calls = []
    before_each(monkeypatch, os, "fsync", lambda _: calls.append("sync"))
    before_each(monkeypatch, os, "replace", lambda *_: calls.append("name"))
    write_atomically(tmp_path / "x", b"one", b"two")
    assert calls == ["sync", "name", "sync"]  # the file, then its folder
    for failing in ("replace", "fsync"):
        monkeypatch.setattr(os, failing, mock.Mock(side_effect=OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            write_atomically(tmp_path / "x", b"new")
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"onetwo"]
