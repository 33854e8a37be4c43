import os
import random
import struct
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.data import shards
from fastgpt.data.shards import LARGE, SMALL, Tokens, read_shard, write_shard
from fastgpt.errors import UserError
from fastgpt.storage import write_atomically

ROOT = Path(__file__).parents[2]

# llm.c's two formats, written down a second time with nothing but struct: magic, version, letter
FORMATS = {"uint16": (20240520, 1, "H"), "uint32": (20240801, 7, "I")}
DTYPES = {"uint16": SMALL, "uint32": LARGE}


def llmc_bytes(ids, kind="uint16", magic=None, version=None, count=None):
    """A shard as llm.c writes it; what is given instead of the header's own numbers is wrong."""
    known_magic, known_version, letter = FORMATS[kind]
    header = struct.pack(
        "<3i", magic or known_magic, version or known_version, len(ids) if count is None else count
    )
    return header.ljust(1024, b"\0") + struct.pack(f"<{len(ids)}{letter}", *ids)


def llmc_read(path):
    """The kind and the ids of a shard, as llm.c reads them."""
    data = path.read_bytes()
    magic, version, count = struct.unpack_from("<3i", data)
    [(kind, letter)] = [
        (kind, letter) for kind, (m, v, letter) in FORMATS.items() if (m, v) == (magic, version)
    ]
    assert len(data) == 1024 + count * struct.calcsize(letter)
    assert not any(data[12:1024])
    return kind, list(struct.unpack_from(f"<{count}{letter}", data, 1024))


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "train_000000.bin"
    write_shard(path, np.arange(100))
    return path


@pytest.fixture
def three_thousand(tmp_path):
    """3,000 shards of 5 tokens, which are 0, 1, 2, ... as one sequence."""
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(3_000):
        (folder / f"train_{i:06d}.bin").write_bytes(llmc_bytes(range(5 * i, 5 * i + 5)))
    return folder


# --- one shard ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.data())
def test_files_are_llmc_files_both_ways(tmp_path_factory, kind, data):
    largest = np.iinfo(DTYPES[kind]).max
    ids = data.draw(st.lists(st.integers(0, int(largest)), min_size=1, max_size=50))
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "ours.bin", np.array(ids), DTYPES[kind])
    assert llmc_read(folder / "ours.bin") == (kind, ids)
    (folder / "theirs.bin").write_bytes(llmc_bytes(ids, kind))
    tokens = read_shard(folder / "theirs.bin")
    assert (tokens.dtype, tokens.tolist()) == (DTYPES[kind], ids)


def test_shard_is_mapped_and_read_only(shard):
    tokens = read_shard(shard)
    with open(shard, "r+b") as file:
        file.seek(1024)
        file.write(struct.pack("<H", 7))
    assert tokens[0] == 7  # a copy would not see what is written to the file
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_strided_and_big_endian_tokens_are_written_in_order(tmp_path):
    tokens = np.arange(20, dtype=">i4")[::2]
    write_shard(tmp_path / "x.bin", tokens)
    assert read_shard(tmp_path / "x.bin").tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("kind", "bad"), [("uint16", -1), ("uint16", 65_536), ("uint32", -1), ("uint32", 2**32)]
)
def test_id_that_does_not_fit_is_named(tmp_path, kind, bad):
    with pytest.raises(UserError, match=rf"x\.bin: token 2 is {bad},"):
        write_shard(tmp_path / "x.bin", np.array([0, 65_535, bad, bad]), DTYPES[kind])
    assert list(tmp_path.iterdir()) == []


def test_empty_shard_is_refused(tmp_path):
    with pytest.raises(UserError, match="not 0"):
        write_shard(tmp_path / "x.bin", np.empty(0, np.uint16))


@pytest.mark.parametrize("read", [read_shard, lambda path: Tokens([path])], ids=["one", "many"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes, too short"),
        (llmc_bytes([])[:-1], "1023 bytes, too short"),
        (llmc_bytes([1, 2], magic=7), "magic 7 at byte 0, expected 20240520 or 20240801"),
        (llmc_bytes([1, 2], version=7), "version 7 at byte 4, expected 1"),
        (llmc_bytes([1, 2], "uint32", version=1), "version 1 at byte 4, expected 7"),
        # uint16 tokens under the header of uint32
        (llmc_bytes([1, 2], magic=20240801, version=7), r"2 tokens at byte 8 \(1,032 bytes\)"),
        (
            llmc_bytes([1, 2], count=3),
            r"promises 3 tokens at byte 8 \(1,030 bytes\), the file ends at byte 1,028",
        ),
        (llmc_bytes([1, 2], count=1), "promises 1 tokens"),
        (llmc_bytes([1, 2])[:-1], "the file ends at byte 1,027"),
        (llmc_bytes([1, 2], "uint32")[:-2], "the file ends at byte 1,030"),
        (llmc_bytes([]), "promises 0 tokens"),
        (llmc_bytes([], count=-1), "promises -1 tokens"),
    ],
)
def test_damaged_shard_is_named(tmp_path, content, complaint, read):
    path = tmp_path / "val_000000.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"val_000000\.bin: .*{complaint}"):
        read(path)


def test_missing_shard_is_named(tmp_path):
    with pytest.raises(UserError, match=r"x\.bin: no such shard"):
        read_shard(tmp_path / "x.bin")


# --- many as one ----------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), kind=st.sampled_from([*FORMATS]),
    data=st.data(),
)  # fmt: skip
def test_shards_are_read_as_their_concatenation(tmp_path_factory, lengths, kind, data):
    folder = tmp_path_factory.mktemp("shards")
    ids = np.random.default_rng(0).integers(0, 65_536, sum(lengths))
    for i, (start, stop) in enumerate(pairwise(np.cumsum([0, *lengths]).tolist())):
        (folder / f"{i}.bin").write_bytes(llmc_bytes(ids[start:stop].tolist(), kind))
    tokens = Tokens(sorted(folder.iterdir()))
    assert (len(tokens), tokens.counts.tolist(), tokens.dtype) == (len(ids), lengths, DTYPES[kind])
    bound = st.none() | st.integers(-len(ids) - 2, len(ids) + 2)
    for _ in range(10):
        window = slice(data.draw(bound), data.draw(bound))
        assert tokens[window].tolist() == ids[window].tolist()
        assert tokens[window].dtype == DTYPES[kind]


def test_slice_of_one_shard_is_no_copy(tmp_path):
    for name in "ab":
        write_shard(tmp_path / name, np.arange(5))
    tokens = Tokens([tmp_path / "a", tmp_path / "b"])
    views = {
        (start, stop)
        for start, stop in combinations(range(11), 2)
        if not tokens[start:stop].flags.writeable  # a map is not, a copy is
    }
    assert views == {*combinations(range(6), 2), *combinations(range(5, 11), 2)}


def test_shards_of_two_dtypes_are_refused(tmp_path):
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path, kind in zip(paths, FORMATS):
        path.write_bytes(llmc_bytes([1, 2], kind))
    with pytest.raises(UserError, match=r"b\.bin holds uint32, but .*a\.bin uint16"):
        Tokens(paths)
    with pytest.raises(UserError, match="no token shards"):
        Tokens([])


MANY_FILES = """
import resource, sys
from pathlib import Path
import numpy as np
from fastgpt.data.shards import Tokens
from fastgpt.data.verify import Shard, check_once, document_starts

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
tokens = Tokens(sorted(Path(sys.argv[1]).iterdir()))
for start in np.random.default_rng(0).integers(0, len(tokens) - 17, 5_000).tolist():
    assert tokens[start : start + 17].tolist() == list(range(start, start + 17)), start
assert np.array_equal(tokens[:], np.arange(15_000))  # one slice of all the files
check_once([Shard(path=path) for path in tokens.paths], 15_000)
assert document_starts(tokens, 7_500).tolist() == [0, 7_500]
print("fine")
"""


def test_thousands_of_shards_need_few_file_descriptors(three_thousand, tmp_path):
    """200 are allowed; each map keeps one."""
    environment = {**os.environ, "FASTGPT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", MANY_FILES, str(three_thousand)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("fine\n", "")


def mapped_bytes():
    """What of this process's resident set are pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":") for line in lines if line.startswith(("RssFile", "RssShmem")))
    return sum(int(size.split()[0]) * 1024 for size in sizes.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("count", [1, 4])
def test_random_reads_do_not_grow_the_resident_set(tmp_path, monkeypatch, count):
    """Of 64 MiB that are read all over; a read maps 64 KiB to 2 MiB, as the page cache lies."""
    monkeypatch.setattr(shards, "READS_BETWEEN_RELEASES", 4)
    paths = [tmp_path / f"{i}.bin" for i in range(count)]
    size = 2**25 // count
    for path in paths:
        write_shard(path, np.ones(size, np.uint16))
    tokens = Tokens(paths)
    before, highest = mapped_bytes(), 0
    for i in range(4_000):
        start = random.randrange(len(tokens) - 1_025)
        assert tokens[start : start + 1_025].sum() == 1_025
        if i % 10 == 0:
            highest = max(highest, mapped_bytes() - before)
    assert 2**16 < highest < 20 * 2**20  # less than 64 KiB: nothing was measured


# --- written whole or not at all ------------------------------------------------------------------


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
