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

    def run(texts=DOCUMENTS, name="x.jsonl", separator=None, **options):
        path = write_documents(tmp_path / name, texts, separator=separator or "")
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        return prepare(str(path), out, separator=separator, **options)

    return run


def held_out(out):
    """Returns the decoded documents of both splits, for tokenizers that keep one per line."""
    decode = load_tokenizer(out / "tokenizer.json").decode
    return {split: decode(split_ids(out, split)).splitlines() for split in ("train", "val")}


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.txt", "x.parquet"])
@pytest.mark.parametrize("tokenizer", ["gpt2", "chars", "bytes", "bpe", "wordpiece"])
def test_number_of_workers_changes_no_byte(prepared, name, tokenizer):
    if tokenizer == "gpt2":
        gpt2_files()
    vocab_size = {"bpe": 300, "wordpiece": 300}.get(tokenizer)
    options = {"tokenizer": tokenizer, "vocab_size": vocab_size, "val_fraction": 0.2}
    first, *others = (
        contents(prepared(name=name, workers=workers, shard_tokens=1000, **options))
        for workers in (1, 2, 8)
    )
    assert sum(name.endswith(".bin") for name in first) > 3
    assert all(other == first for other in others)


def test_late_batches_are_written_in_the_order_of_the_text(prepared, monkeypatch):
    def wait(parts, **_):
        time.sleep(0.02 * (zlib.crc32(repr(parts).encode()) % 3))

    expected = contents(prepared(tokenizer="bytes", workers=1))
    before_each(monkeypatch, writing, "encode", wait)
    assert contents(prepared(tokenizer="bytes", workers=8)) == expected


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
        assert held_out(prepared(texts, tokenizer="bytes", val_fraction=0.3)) == expected


def test_splits_that_files_are_named_for_are_kept(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_documents(folder / "train-1.jsonl", ["a", "b"])
    write_documents(folder / "train-2.jsonl.gz", ["c"])
    write_documents(folder / "validation.jsonl", ["b"])  # the least there may be: two tokens
    out = prepare(str(folder), tmp_path / "out", tokenizer="bytes", val_fraction=0.001)
    assert held_out(out) == {"train": ["a", "b", "c"], "val": ["b"]}
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["val_fraction"], manifest["held_out"]) == (None, "named")


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
@pytest.mark.parametrize(("fraction", "missing"), [(1e-17, "validate on"), (1 - 1e-9, "train on")])
def test_split_that_leaves_nothing_is_refused_and_may_be_corrected(
    tmp_path, name, fraction, missing
):
    source = str(write_documents(tmp_path / name, DOCUMENTS))
    said = rf"^a validation fraction of .* of x \([\d,]+ tokens\) leaves nothing to {missing}: use"
    with pytest.raises(UserError, match=said):
        prepare(source, tmp_path / "out", tokenizer="bytes", val_fraction=fraction)
    prepare(source, tmp_path / "out", tokenizer="bytes", val_fraction=0.5)


# --- documents among tokens -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "bpe", "wordpiece"])
def test_end_of_text_goes_before_every_document(prepared, kind):
    if kind == "gpt2":
        gpt2_files()
    out = prepared(name="x.parquet", tokenizer=kind, val_fraction=0.3)
    tokenizer = load_tokenizer(out / "tokenizer.json")
    manifest = json.loads((out / "manifest.json").read_text())
    found = []
    for split in ("train", "val"):
        ids = split_ids(out, split)
        assert ids[0] == tokenizer.eot_id
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eot_id))[1:]
        found += [tokenizer.decode(document[1:]) for document in documents]
        assert manifest["splits"][split]["documents"] == len(documents)
    assert len(found) == len(DOCUMENTS)
    if kind != "wordpiece":  # which does not keep white space
        assert sorted(found) == sorted(DOCUMENTS)


def test_text_that_is_one_document_has_one_end_of_text(prepared):
    gpt2_files()
    out = prepared(["".join(DOCUMENTS)], name="x.txt", tokenizer="gpt2")
    ids = split_ids(out, "train")
    assert np.flatnonzero(ids == 50256).tolist() == [0]
    assert 50256 not in split_ids(out, "val")  # it goes on in the middle of the text
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
    points = [*range(0x20, 0xD800), *range(0xE000, 0xF900), *range(2**16, 2**16 + 9000)]
    many = "".join(map(chr, points))
    assert len(many) > 65_536
    out = prepared([many], name="x.txt", tokenizer="chars", val_fraction=0.5)
    found = np.concatenate([split_ids(out, split) for split in ("train", "val")])
    assert found.dtype == "<u4"
    assert found.tolist() == list(range(len(many)))
    assert read_header(out / "val_000000.bin")[1] == LARGE


# --- shards and manifest --------------------------------------------------------------------------


def test_manifest_tells_what_is_there(prepared, tmp_path):
    out = prepared(tokenizer="bytes", val_fraction=0.3, shard_tokens=1000)
    manifest = json.loads((out / "manifest.json").read_text())
    documents = held_out(out)
    for split, entry in manifest["splits"].items():
        sizes = [len(text.encode()) + 1 for text in documents[split]]
        assert (entry["tokens"], entry["bytes"]) == (sum(sizes), sum(sizes))
        assert entry["documents"] == len(sizes)
        assert [shard["file"] for shard in entry["shards"]] == sorted(
            path.name for path in out.glob(f"{split}_*")
        )
        for shard in entry["shards"]:
            data = (out / shard["file"]).read_bytes()
            assert shard["sha256"] == hashlib.sha256(data).hexdigest()
            assert shard["tokens"] == (len(data) - 1024) // 2
        assert {shard["tokens"] for shard in entry["shards"][:-1]} == {1000}
    assert manifest["held_out"] == "hash"
    assert (manifest["vocab_size"], manifest["eot_id"]) == (256, None)
    changed = prepared([*DOCUMENTS[:-1], "another"], tokenizer="bytes", val_fraction=0.3)
    assert json.loads((changed / "manifest.json").read_text())["sha256"] != manifest["sha256"]


def test_progress_is_told(prepared):
    counts = []
    out = prepared(name="x.jsonl.gz", tokenizer="bytes", report=counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == sum(split_ids(out, split).size for split in ("train", "val"))
    assert len(counts) > 20
