"""Preparations: what they write, the command, and what happens if they are interrupted."""

import gc
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fastgpt import prepare as command
from fastgpt.data import preparation, reading, writing
from fastgpt.data.preparation import prepare
from fastgpt.data.shards import LARGE, read_header
from fastgpt.data.tokenizers import load_tokenizer
from fastgpt.errors import UserError
from tests.data.sets import contents, split_ids, write_documents
from tests.processes import forked
from tests.runs import before_each, files_of_at_most, one_line_error

# None is alike, or their hashes would keep them together; some are long, some in other scripts.
DOCUMENTS = [
    f"Document {i}: naïve {'東京 ' * (i % 7)}{'and so on. ' * (i % 13)}" for i in range(200)
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shrinks what is read and tokenized at a time, so that even a short text has many parts."""
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100)


@pytest.fixture
def prepared(tmp_path):
    def run(texts=DOCUMENTS, name="x.jsonl", separator=None, tokenizer="bytes", **options):
        path = write_documents(tmp_path / name, texts, separator=separator or "")
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        if tokenizer in ("bpe", "wordpiece"):
            options["vocab_size"] = 300
        return prepare(str(path), out, separator=separator, tokenizer=tokenizer, **options)

    return run


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


def held_out(out):
    """Returns the decoded documents of both splits, for tokenizers that keep one per line."""
    decode = load_tokenizer(out / "tokenizer.json").decode
    return {split: decode(split_ids(out, split)).splitlines() for split in ("train", "val")}


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [(kind, "x.txt") for kind in ("chars", "bytes", "bpe")]
    + [(kind, "x.parquet") for kind in ("bytes", "bpe", "wordpiece")],
)
def test_number_of_workers_changes_no_byte(prepared, monkeypatch, name, tokenizer):
    options = {"name": name, "tokenizer": tokenizer, "val_fraction": 0.2, "shard_tokens": 1000}
    alone = contents(prepared(workers=1, **options))
    assert sum(name.endswith(".bin") for name in alone) > 3

    def wait(parts, **_):
        time.sleep(0.02 * (zlib.crc32(repr(parts).encode()) % 3))

    before_each(monkeypatch, writing, "encode", wait)
    assert contents(prepared(workers=8, **options)) == alone


def test_hash_alone_decides_what_is_held_out(prepared):
    def hashed(text):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    shuffled = random.Random(0).sample(DOCUMENTS, len(DOCUMENTS)) + DOCUMENTS[:20]  # some twice
    for texts in (DOCUMENTS, shuffled):
        # written down a second time: another version of the code must split as this one did
        expected = {
            "train": [text for text in texts if hashed(text) >= 0.3],
            "val": [text for text in texts if hashed(text) < 0.3],
        }
        assert 40 < len(expected["val"]) < 80
        assert held_out(prepared(texts, val_fraction=0.3)) == expected


def test_splits_that_files_are_named_for_are_kept(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_documents(folder / "train-1.jsonl", ["a", "b"])
    write_documents(folder / "train-2.jsonl.gz", ["c"])
    write_documents(folder / "validation.jsonl", ["b"])  # the least there may be: two tokens
    out = prepare(str(folder), tmp_path / "out", tokenizer="bytes", val_fraction=0.001)
    assert held_out(out) == {"train": ["a", "b", "c"], "val": ["b"]}
    manifest = manifest_of(out)
    assert (manifest["val_fraction"], manifest["held_out"]) == (None, "named")


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_split_that_leaves_nothing_is_refused(prepared, name):
    for fraction, missing in ((1e-17, "validate on"), (1 - 1e-9, "train on")):
        with pytest.raises(UserError, match=rf"{fraction} of x .* leaves nothing to {missing}"):
            prepared(name=name, val_fraction=fraction)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_end_of_text_goes_before_every_document(prepared, kind):
    out = prepared(name="x.parquet", tokenizer=kind, val_fraction=0.3)
    tokenizer, found = load_tokenizer(out / "tokenizer.json"), []
    for split in ("train", "val"):
        ids = split_ids(out, split)
        assert ids[0] == tokenizer.eot_id
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eot_id))[1:]
        found += [tokenizer.decode(document[1:]) for document in documents]
        assert manifest_of(out)["splits"][split]["documents"] == len(documents)
    assert len(found) == len(DOCUMENTS)
    if kind == "bpe":  # which keeps white space
        assert sorted(found) == sorted(DOCUMENTS)


def test_text_that_is_one_document_has_one_end_of_text(prepared):
    out = prepared(["".join(DOCUMENTS)], name="x.txt", tokenizer="bpe")
    ids = split_ids(out, "train")
    assert np.flatnonzero(ids == 0).tolist() == [0]
    assert 0 not in split_ids(out, "val")  # it goes on in the middle of the text
    text = load_tokenizer(out / "tokenizer.json").decode([*ids[1:], *split_ids(out, "val")])
    assert text == "".join(DOCUMENTS)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_newline_ends_documents_where_no_token_does(prepared, tokenizer):
    texts = [*DOCUMENTS, "has one\n"]
    out = prepared(texts, name="x.txt.gz", separator="<|end|>", tokenizer=tokenizer)
    found = held_out(out)
    assert sorted(found["train"] + found["val"]) == sorted(text.strip("\n") for text in texts)
    alone = prepared([text.strip("\n") for text in texts], name="x.jsonl", tokenizer=tokenizer)
    assert held_out(alone) == found  # a newline that no document has is a character all the same


def test_more_than_65536_tokens_are_written_as_32_bits(prepared):
    many = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x12900)]))
    assert len(many) > 65_536
    out = prepared([many], name="x.txt", tokenizer="chars", val_fraction=0.5)
    found = np.concatenate([split_ids(out, split) for split in ("train", "val")])
    assert found.dtype == "<u4"
    assert found.tolist() == list(range(len(many)))
    assert read_header(out / "val_000000.bin")[1] == LARGE


def test_manifest_tells_what_is_there(prepared):
    out = prepared(name="x.jsonl.gz", val_fraction=0.3, shard_tokens=1000)
    manifest, documents = manifest_of(out), held_out(out)
    for split, entry in manifest["splits"].items():
        sizes = [len(text.encode()) + 1 for text in documents[split]]
        assert (entry["tokens"], entry["bytes"]) == (sum(sizes), sum(sizes))
        assert entry["documents"] == len(sizes)
        paths = sorted(out.glob(f"{split}_*"))
        assert [shard["file"] for shard in entry["shards"]] == [path.name for path in paths]
        for shard, path in zip(entry["shards"], paths):
            assert shard["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
            assert shard["tokens"] == (path.stat().st_size - 1024) // 2
        assert {shard["tokens"] for shard in entry["shards"][:-1]} == {1000}
    assert manifest["held_out"] == "hash"
    assert (manifest["vocab_size"], manifest["eot_id"]) == (256, None)
    changed = prepared([*DOCUMENTS[:-1], "another"], val_fraction=0.3)
    assert manifest_of(changed)["sha256"] != manifest["sha256"]


def test_flags_reach_the_preparation_and_the_result_is_printed(tmp_path, capsys):
    source = write_documents(tmp_path / "y.jsonl", DOCUMENTS * 4, field="body")
    flags = "--field body --tokenizer bpe --vocab-size 270 --val-fraction 0.25 --shard-tokens 900"
    command.main([str(source), "--out", str(tmp_path / "out"), "--workers", "3", *flags.split()])
    manifest = manifest_of(tmp_path / "out")
    assert [manifest[x] for x in ("tokenizer", "vocab_size", "val_fraction")] == ["bpe", 270, 0.25]
    train, val = manifest["splits"].values()
    assert train["shards"][0]["tokens"] == 900
    assert val["documents"] == pytest.approx(200, abs=40)
    said = capsys.readouterr().out
    assert f"{train['tokens']:,} training + {val['tokens']:,} validation tokens" in said
    assert manifest["sha256"] in said


def test_separator_is_taken_as_a_shell_hands_it_over(tmp_path):
    (tmp_path / "x.txt").write_text("\t— A".join(DOCUMENTS), encoding="utf-8")
    flags = ["--separator", r"\t— \x41", "--tokenizer", "bytes", "--val-fraction", "0.3"]
    command.main([str(tmp_path / "x.txt"), "--out", str(tmp_path / "out"), *flags])
    found = held_out(tmp_path / "out")
    assert sorted(found["train"] + found["val"]) == sorted(DOCUMENTS)


@pytest.mark.parametrize(
    "flags",
    [r"--separator \xzz", "--workers 0", "--shard-tokens 0", "--val-fraction 1.0",
     "--val-fraction nan"],
)  # fmt: skip
def test_wrong_flag_is_named_in_one_line(tmp_path, capsys, flags):
    argv = [str(write_documents(tmp_path / "x.jsonl", DOCUMENTS)), "--out", str(tmp_path / "out")]
    said = one_line_error(capsys, command.main, [*argv, "--tokenizer", "bytes", *flags.split()])
    assert flags.split()[0] in said


def test_gpt2s_files_are_missed_before_a_long_download(tmp_path, monkeypatch):
    offline = mock.Mock(side_effect=UserError("offline"))
    monkeypatch.setattr(preparation, "make_tokenizer", offline)
    monkeypatch.setattr(preparation, "find_source", None)
    for name, tokenizer in (("hf:one/set", "auto"), ("fineweb", "auto"), ("x.jsonl", "gpt2")):
        with pytest.raises(UserError, match="offline"):
            prepare(name, tmp_path / "out", tokenizer=tokenizer)


def peaks(folder):
    """Prepares two files and prints the highest memory after each."""
    for name in ("small", "large"):
        prepare(f"{folder / name}.parquet", folder / name, tokenizer="bytes", workers=2)
        # not ru_maxrss, which starts at the peak of the process that started this one
        print(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_source(tmp_path):
    for size, megabytes in (("small", 8), ("large", 56)):
        lines = [f"{i} {'some words and numbers; ' * 40}" for i in range(megabytes * 2**10)]
        write_documents(tmp_path / f"{size}.parquet", lines)
    done = forked(peaks, tmp_path)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 24 * 1024  # KiB, for 48 MiB more; read whole, 48 MiB at the least


@pytest.fixture
def preparing(tmp_path):
    """Prepares a text with fixed options, which arguments override."""
    source = write_documents(tmp_path / "x.jsonl", DOCUMENTS)

    def run(out="out", **options):
        fixed = {"tokenizer": "bytes", "val_fraction": 0.3, "shard_tokens": 800, "workers": 2}
        return prepare(str(source), tmp_path / out, **{**fixed, **options})

    return run


CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate")


def killed(source, out, last=0):
    """Prepares in a process that is killed before its change number `last`; True if it was."""
    if not (child := os.fork()):
        left = last

        def count(event, arguments):
            nonlocal left
            if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = lambda _: None  # a killed process loses no page
        sys.addaudithook(count)
        try:
            prepare(source, out, tokenizer="chars", shard_tokens=50, val_fraction=0.3, workers=2)
        finally:
            os._exit(not (out / "manifest.json").exists())
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"failed at change {last}"
    return status == signal.SIGKILL


def kill_at_every_change(source, folder):
    reading.CHUNK_BYTES, writing.BATCH_CHARACTERS = 40, 60
    killed(source, folder / "whole")
    whole, out = contents(folder / "whole"), folder / "out"
    kills = 0
    while killed(source, out, kills + 1):
        kills += 1
        assert not out.exists() or contents(out) == whole, kills
        if kills % 3 == 0:  # the others are begun again by one that is killed, too
            killed(source, out)
            assert contents(out) == whole, kills
            assert not out.with_name("out.incomplete").exists()
            shutil.rmtree(out)
    assert contents(out) == whole
    assert len(whole) >= 5
    assert kills > 20


def test_killed_wherever_it_changes_the_disk_nothing_looks_whole(tmp_path):
    (tmp_path / "notes").mkdir()
    for name in "abc":  # each without its last newline
        (tmp_path / "notes" / name).write_text(f"file {name}: {'some words naïve and ' * 3}end")
    done = forked(kill_at_every_change, str(tmp_path / "notes"), tmp_path)
    assert done.returncode == 0, done.stderr


def test_full_disk_is_told(preparing, tmp_path):
    whole = contents(preparing("whole", shard_tokens=3000))
    said = r"^cannot write .*out: File too large$"
    with files_of_at_most(3000), pytest.raises(UserError, match=said) as raised:
        preparing(shard_tokens=3000)
    assert not (tmp_path / "out.incomplete").exists()
    del raised  # with the files it left open, whose last bytes must not come after all
    gc.collect()
    assert contents(preparing(shard_tokens=3000)) == whole


def test_unfinished_shards_have_no_header_and_another_process_is_refused(preparing, tmp_path):
    refused = []

    def report(tokens):
        for path in (tmp_path / "out.incomplete").glob("*.bin"):
            assert path.read_bytes()[:1024] == bytes(1024)
        if len(refused) < 3:
            with pytest.raises(UserError, match=r"another process is preparing .*out: wait"):
                preparing()
            refused.append(tokens)

    out = preparing(report=report)
    assert len(refused) == 3
    assert contents(out) == contents(preparing("whole"))


def test_place_that_is_taken_is_refused_and_kept(preparing, tmp_path, monkeypatch):
    out = preparing()
    (tmp_path / "empty").mkdir()
    preparing("empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    before = contents(tmp_path)
    for taken in ("full", "x.jsonl"):
        with pytest.raises(UserError, match="is not an empty directory"):
            preparing(taken)
    with pytest.raises(UserError, match="holds another preparation"):
        preparing(tokenizer="chars")
    monkeypatch.setattr(preparation, "write_directory", None)
    assert preparing() == out  # the same request
    monkeypatch.setattr("pathlib.Path.is_mount", lambda _: True)
    with pytest.raises(UserError, match="other is a mount point"):
        preparing("other")
    assert contents(tmp_path) == before
