import os
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.data import shards
from fastgpt.data.shards import Tokens
from fastgpt.errors import UserError
from fastgpt.files import write_atomically
from tests.data.sets import FORMATS, shard_bytes, write_shard
from tests.processes import python
from tests.runs import before_each

# --- one shard ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes, too short"),
        (shard_bytes([])[:-1], "1023 bytes, too short"),
        (shard_bytes([1, 2], magic=7), "magic 7 at byte 0, expected 20240520 or 20240801"),
        (shard_bytes([1, 2], version=7), "version 7 at byte 4, expected 1"),
        (shard_bytes([1, 2], "uint32", version=1), "version 1 at byte 4, expected 7"),
        # uint16 tokens under the header of uint32
        (shard_bytes([1, 2], magic=20240801, version=7), r"2 tokens at byte 8 \(1,032 bytes\)"),
        (
            shard_bytes([1, 2], count=3),
            r"says 3 tokens at byte 8 \(1,030 bytes\), but the file ends at byte 1,028",
        ),
        (shard_bytes([1, 2], count=1), "says 1 token "),
        (shard_bytes([1, 2])[:-1], "the file ends at byte 1,027"),
        (shard_bytes([1, 2], "uint32")[:-2], "the file ends at byte 1,030"),
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


# --- many as one ----------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), kind=st.sampled_from([*FORMATS]),
    data=st.data(),
)  # fmt: skip
def test_shards_are_read_as_their_concatenation(tmp_path_factory, lengths, kind, data):
    folder = tmp_path_factory.mktemp("shards")
    ids = np.random.default_rng(0).integers(0, np.iinfo(kind).max, sum(lengths), endpoint=True)
    for i, (start, stop) in enumerate(pairwise(np.cumsum([0, *lengths]).tolist())):
        write_shard(folder / f"{i}.bin", ids[start:stop], kind)
    tokens = Tokens(sorted(folder.iterdir()))
    assert (len(tokens), tokens.counts.tolist(), tokens.dtype) == (len(ids), lengths, kind)
    bound = st.none() | st.integers(-len(ids) - 2, len(ids) + 2)
    for _ in range(10):
        window = slice(data.draw(bound), data.draw(bound))
        assert tokens[window].tolist() == ids[window].tolist()
        assert tokens[window].dtype == kind


def test_shard_that_is_cut_while_in_use_is_named(tmp_path):
    tokens = Tokens([write_shard(tmp_path / "x.bin", range(100))])
    os.truncate(tmp_path / "x.bin", 1_101)
    assert tokens[:38].tolist() == [*range(38)]
    with pytest.raises(UserError, match=r"x\.bin ends at byte 1,101: it was cut while in use"):
        tokens[30:39]


def test_a_shard_stays_open_while_it_is_read(tmp_path, monkeypatch):
    """A read gets its own shard, though another thread opens the next one just before."""
    monkeypatch.setattr(shards, "OPEN_FILES", 1)
    tokens = Tokens([write_shard(tmp_path / f"{i}.bin", [i, i]) for i in range(2)])
    before_each(monkeypatch, os, "pread", once(lambda *_: tokens[2:4]))
    assert tokens[0:2].tolist() == [0, 0]


def once(act):
    left = [act]
    return lambda *args: left and left.pop()(*args)


def test_shards_of_two_dtypes_are_refused(tmp_path):
    paths = [write_shard(tmp_path / f"{kind}.bin", [1, 2], kind) for kind in FORMATS]
    with pytest.raises(UserError, match=r"holds uint32, but .*uint16\.bin holds uint16"):
        Tokens(paths)
    with pytest.raises(UserError, match="no token shards"):
        Tokens([])


MANY_FILES = """
import resource, sys
from pathlib import Path
import numpy as np
from fastgpt.data import shards
from fastgpt.data.shards import Tokens
from fastgpt.data.verify import check_once, document_starts

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
tokens = Tokens(sorted(Path(sys.argv[1]).iterdir()))
for start in np.random.default_rng(0).integers(0, len(tokens) - 17, 5_000).tolist():
    assert tokens[start : start + 17].tolist() == list(range(start, start + 17)), start
assert np.array_equal(tokens[:], np.arange(15_000))  # one slice of all the files
check_once(dict.fromkeys(tokens.paths), 15_000)
assert document_starts(tokens, 7_500).tolist() == [0, 7_500]
print("fine")
"""


def test_thousands_of_shards_need_few_file_descriptors(tmp_path):
    """Thousands of shards are read with a limit of 200 file descriptors."""
    (tmp_path / "many").mkdir()
    for i in range(3_000):
        write_shard(tmp_path / "many" / f"train_{i:06d}.bin", range(5 * i, 5 * i + 5))
    done = python("-c", MANY_FILES, tmp_path / "many")
    assert (done.stdout, done.stderr) == ("fine\n", "")


# --- written whole or not at all ------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    write_atomically(tmp_path / "x", b"old")
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(os, failing, mock.Mock(side_effect=no_space))
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "x", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_file_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    before_each(monkeypatch, os, "fsync", lambda _: calls.append("sync"))
    before_each(monkeypatch, os, "replace", lambda *_: calls.append("name"))
    write_atomically(tmp_path / "x", b"one", b"two")
    assert (tmp_path / "x").read_bytes() == b"onetwo"
    assert calls == ["sync", "name", "sync"]  # the file, then its folder
