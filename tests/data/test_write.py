import hashlib
import json
import random
import time
import zlib

import numpy as np
import pytest

from fastgpt.data import writing
from fastgpt.data.preparation import prepare
from fastgpt.data.shards import LARGE, read_header
from fastgpt.data.tokenizers import load_tokenizer
from fastgpt.errors import UserError
from tests.data.sets import contents, gpt2_files, split_ids, write_documents
from tests.runs import before_each

# None is alike, or their hashes would keep them together; some are long, some in other scripts.
DOCUMENTS = [
    f"Document {i}: naïve {'東京 ' * (i % 7)}{'and so on. ' * (i % 13)}" for i in range(200)
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shrinks the batches of the tokenizer, so that even a short text has many."""
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 500)


@pytest.fixture
def prepared(tmp_path):
    """Prepares texts that are written to a file of that name; returns the directory."""

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


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("gpt2", "x.txt"), ("chars", "x.txt"), ("bytes", "x.txt"), ("bytes", "x.parquet"),
        ("bpe", "x.parquet"), ("wordpiece", "x.parquet"),
    ],
)  # fmt: skip
def test_number_of_workers_changes_no_byte(prepared, name, tokenizer):
    if tokenizer == "gpt2":
        gpt2_files()
    options = {"name": name, "tokenizer": tokenizer, "val_fraction": 0.2, "shard_tokens": 1000}
    alone, together = (contents(prepared(workers=workers, **options)) for workers in (1, 8))
    assert sum(name.endswith(".bin") for name in alone) > 3
    assert alone == together


def test_late_batches_are_written_in_the_order_of_the_text(prepared, monkeypatch):
    def wait(parts, **_):
        time.sleep(0.02 * (zlib.crc32(repr(parts).encode()) % 3))

    expected = contents(prepared(workers=1))
    before_each(monkeypatch, writing, "encode", wait)
    assert contents(prepared(workers=8)) == expected


# --- splits ---------------------------------------------------------------------------------------


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
@pytest.mark.parametrize(("fraction", "missing"), [(1e-17, "validate on"), (1 - 1e-9, "train on")])
def test_split_that_leaves_nothing_is_refused(prepared, name, fraction, missing):
    with pytest.raises(UserError, match=rf"{fraction} of x .* leaves nothing to {missing}"):
        prepared(name=name, val_fraction=fraction)


# --- documents among tokens -----------------------------------------------------------------------


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


# --- shards and manifest --------------------------------------------------------------------------


def test_manifest_tells_what_is_there(prepared):
    counts = []
    out = prepared(name="x.jsonl.gz", val_fraction=0.3, shard_tokens=1000, report=counts.append)
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
    # the progress is told
    assert counts == sorted(counts)
    assert counts[-1] == sum(split["tokens"] for split in manifest["splits"].values())
    assert len(counts) > 20
