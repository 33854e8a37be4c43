"""Verification finds any damage of a shard, and does not read an intact one twice."""

import os
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastgpt.data import verify
from fastgpt.data.shards import Tokens
from fastgpt.data.verify import Shard, check_once, check_shard, checksums, document_starts
from fastgpt.errors import UserError
from tests.data.sets import FORMATS, flip, same_times, write_shard
from tests.runs import before_each

BLOCK = 2048
"""Block size of the checksums in these tests, so that a file of 9 KB has five blocks."""
TOKENS = 4_000
BYTES = 1024 + 2 * TOKENS


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(verify, "BLOCK_BYTES", BLOCK)


def summed(path):
    """Writes a shard of `TOKENS` token ids up to 999 and records its checksums."""
    sums = checksums(write_shard(path, np.arange(TOKENS) % 1_000))
    return Shard(path=path, sha256=sums["sha256"], crc32=tuple(sums["crc32"]))


@pytest.fixture
def shard(tmp_path):
    return summed(tmp_path / "train_000003.bin")


@pytest.fixture
def reads(monkeypatch):
    """Records the names of the shards that are read whole."""
    seen = []
    before_each(
        monkeypatch, verify, "check_shard", lambda shard, *_, **__: seen.append(shard.path.name)
    )
    return seen


# --- one shard ------------------------------------------------------------------------------------


def test_checksums_are_of_the_whole_file_and_of_each_block(shard):
    data = shard.path.read_bytes()
    assert [zlib.crc32(data[i : i + BLOCK]) for i in range(0, BYTES, BLOCK)] == [*shard.crc32]
    check_shard(shard, 1_000)


@given(byte=st.integers(0, BYTES - 1), bit=st.integers(0, 7), sha256=st.booleans())
@example(byte=12, bit=0, sha256=False)  # the first zero of the header
@example(byte=BLOCK - 1, bit=7, sha256=False)
@example(byte=BLOCK, bit=0, sha256=False)
@example(byte=BYTES - 1, bit=7, sha256=False)
def test_any_flipped_bit_is_found_where_it_is(tmp_path_factory, byte, bit, sha256):
    shard = summed(tmp_path_factory.mktemp("shards") / "x.bin")
    flip(shard.path, byte, bit)
    with pytest.raises(UserError, match=r"x\.bin: ") as caught:
        check_shard(shard, 65_536, sha256=sha256)
    if byte < 12:
        assert f"at byte {byte // 4 * 4}" in str(caught.value)  # magic, version or count
        return
    start = byte // BLOCK * BLOCK
    assert f"between byte {start:,} and byte {min(start + BLOCK, BYTES):,}:" in str(caught.value)


def test_another_file_of_right_blocks_is_told_by_its_sha256(shard):
    """A shard whose blocks match but whose sha256 differs is refused.

    The two kinds of checksums in the manifest belong to two different files.
    """
    other = Shard(path=shard.path, sha256="0" * 64, crc32=shard.crc32)
    check_shard(other, 1_000, sha256=False)
    with pytest.raises(UserError, match=rf"train_000003\.bin: sha256 {shard.sha256}, expected 000"):
        check_shard(other, 1_000)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("position", [0, 511, 512, 1_023, 1_024, TOKENS - 1])
def test_id_beyond_the_vocabulary_is_named_with_its_byte(tmp_path, kind, position):
    """A token id beyond the vocabulary is named with its position in bytes.

    It may stand at either end of the file or of a block, in a shard without recorded checksums.
    """
    ids = np.full(TOKENS, 299)
    ids[position:] = 300
    path = write_shard(tmp_path / "val_000000.bin", ids, kind)
    byte = 1024 + position * np.dtype(kind).itemsize
    complaint = rf"val_000000\.bin: token id 300 at byte {byte:,}, but the vocabulary ends at 299$"
    with pytest.raises(UserError, match=complaint):
        check_shard(Shard(path=path), 300)
    check_shard(Shard(path=path), 301)


# --- once -----------------------------------------------------------------------------------------


def test_shards_are_read_once_until_they_change(shard, tmp_path, reads):
    other = Shard(path=write_shard(tmp_path / "val_000000.bin", range(10)))
    both = [shard, other]
    check_once(both, 1_000)
    assert sorted(reads) == ["train_000003.bin", "val_000000.bin"]
    check_once(both, 1_000)
    assert len(reads) == 2
    check_once(both, 2_000)  # another vocabulary: another question
    assert len(reads) == 4
    status = other.path.stat()
    os.utime(other.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    check_once(both, 1_000)
    assert reads[4:] == ["val_000000.bin"]
    write_shard(other.path, range(11))
    same_times(other.path, status)
    check_once(both, 1_000)
    assert reads[5:] == ["val_000000.bin"]


def test_damage_is_told_every_time_until_it_is_mended(shard, reads):
    flip(shard.path, 5_000)
    for _ in range(2):
        with pytest.raises(UserError, match="damaged between byte 4,096 and byte 6,144"):
            check_once([shard], 1_000)
    flip(shard.path, 5_000)
    check_once([shard], 1_000)
    check_once([shard], 1_000)
    assert len(reads) == 3


def test_damaged_memory_of_what_passed_costs_one_more_read(shard, reads):
    check_once([shard], 1_000)
    [record] = (verify.cache_dir() / "checked").iterdir()
    record.write_text('{"half')
    check_once([shard], 1_000)
    check_once([shard], 1_000)
    assert len(reads) == 2


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
        patch.setattr(verify, "BLOCK_BYTES", block)
        starts = document_starts(tokens, 3)
    expected = [i for i, token in enumerate(ids) if token == 3 or i == 0]
    assert (starts.dtype, starts.tolist()) == (np.int64, expected)


def test_documents_are_looked_for_once_until_a_shard_changes(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "x.bin", [7, 1, 7, 1])
    searches = []
    before_each(monkeypatch, verify, "_find", lambda *args: searches.append(args))
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


def test_what_passed_is_kept_though_another_shard_did_not(tmp_path, reads):
    shards = [
        Shard(path=write_shard(tmp_path / f"{largest}.bin", [0, largest])) for largest in (5, 6, 50)
    ]
    for _ in range(2):
        with pytest.raises(UserError, match=r"50\.bin: token id 50"):
            check_once(shards, 10)
    assert sorted(reads[:3]) == ["5.bin", "50.bin", "6.bin"]
    assert reads[3:] == ["50.bin"]
