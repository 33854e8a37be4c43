"""Verification finds any damage of a shard, and does not read an intact one twice."""

import hashlib
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastgpt.data import verify
from fastgpt.data.shards import Tokens
from fastgpt.data.verify import check_once, check_shard, document_starts
from fastgpt.errors import UserError
from tests.data.sets import FORMATS, flip, same_times, write_shard
from tests.runs import before_each

TOKENS = 4_000
BYTES = 1024 + 2 * TOKENS


def summed(path):
    """Writes a shard of `TOKENS` token ids up to 999 and records its sha256."""
    write_shard(path, np.arange(TOKENS) % 1_000)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def shard(tmp_path):
    return summed(tmp_path / "train_000003.bin")


@pytest.fixture
def reads(monkeypatch):
    """Records the names of the shards that are read whole."""
    seen = []
    before_each(monkeypatch, verify, "check_shard", lambda path, *_: seen.append(path.name))
    return seen


# --- one shard ------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("position", [0, 1_024, TOKENS - 1])
def test_id_beyond_the_vocabulary_is_named(tmp_path, kind, position):
    """A token id beyond the vocabulary is named.

    It may stand at either end of the file, in a shard without a recorded sha256.
    """
    ids = np.full(TOKENS, 299)
    ids[position:] = 300
    path = write_shard(tmp_path / "val_000000.bin", ids, kind)
    complaint = r"val_000000\.bin has the token id 300, but the vocabulary ends at 299$"
    with pytest.raises(UserError, match=complaint):
        check_shard(path, None, 300)
    check_shard(path, None, 301)


# --- once -----------------------------------------------------------------------------------------


def test_shards_are_read_once_until_they_change(shard, tmp_path, reads):
    other = write_shard(tmp_path / "val_000000.bin", range(10))
    both = dict([shard, (other, None)])
    check_once(both, 1_000)
    assert sorted(reads) == ["train_000003.bin", "val_000000.bin"]
    check_once(both, 1_000)
    assert len(reads) == 2
    check_once(both, 2_000)  # another vocabulary: another question
    assert len(reads) == 4
    status = other.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    check_once(both, 1_000)
    assert reads[4:] == ["val_000000.bin"]
    write_shard(other, range(11))
    same_times(other, status)
    check_once(both, 1_000)
    assert reads[5:] == ["val_000000.bin"]


def test_damage_is_told_every_time_until_it_is_mended(shard, reads):
    flip(shard[0], 5_000)
    for _ in range(2):
        with pytest.raises(UserError, match=r"train_000003\.bin is damaged: its sha256 is"):
            check_once(dict([shard]), 1_000)
    flip(shard[0], 5_000)
    check_once(dict([shard]), 1_000)
    check_once(dict([shard]), 1_000)
    assert len(reads) == 3


# --- documents ------------------------------------------------------------------------------------


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 59), max_size=3), block=st.integers(1, 70),
)  # fmt: skip
@example(ids=[3, 3, 3], cuts=[1], block=1)
def test_documents_begin_at_the_first_token_and_at_each_end_of_text(
    tmp_path_factory, ids, cuts, block
):
    folder = tmp_path_factory.mktemp("shards")
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for i, (start, stop) in enumerate(pairwise(bounds)):
        write_shard(folder / f"{i}.bin", ids[start:stop])
    tokens = Tokens(sorted(folder.iterdir()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "BLOCK_TOKENS", block)
        starts = document_starts(tokens, 3)
    expected = [i for i, token in enumerate(ids) if token == 3 or i == 0]
    assert (starts.dtype, starts.tolist()) == (np.int64, expected)


def test_documents_are_looked_for_once_until_a_shard_changes(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "x.bin", [7, 1, 7, 1])
    searches = []
    before_each(monkeypatch, verify, "_blocks", lambda *args: searches.append(args))
    for _ in range(2):
        starts = document_starts(Tokens([path]), 7)
        assert starts.tolist() == [0, 2]
    assert len(searches) == 1
    assert document_starts(Tokens([path]), 1).tolist() == [0, 1, 3]  # another end of text
    status = path.stat()
    write_shard(path, [7, 1, 1, 7, 1])
    same_times(path, status)
    assert document_starts(Tokens([path]), 7).tolist() == [0, 3]
    assert len(searches) == 3
