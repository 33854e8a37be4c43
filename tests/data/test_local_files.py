import gzip
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fastgpt.data import reading
from fastgpt.data.reading import opened, read_chunks
from fastgpt.data.sources import find_source
from fastgpt.errors import UserError
from tests.data.sets import PACKERS, write_documents

CONTENT = "One line, naïve.\r\nAnother.\n".encode() * 50
ENGLISH = "One two three,\nfour five.\n" * 9
CHINESE = "天地玄黃、宇宙洪荒。\n日月盈昃、辰宿列張。\n" * 9
ACCENTS = "Zwölf Boxkämpfer jagen.\n" * 9


def write(root, contents):
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def listed(given):
    return find_source(str(given)).files


def names(given, root):
    return [file.path.removeprefix(f"{root}/") for file in listed(given)]


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", *PACKERS])
@pytest.mark.parametrize("size", [7, 10**6])
def test_every_kind_of_file_is_unpacked_to_its_end(tmp_path, suffix, size):
    path = write_documents(tmp_path / f"x.txt{suffix}", [CONTENT.decode()])
    with opened(str(path)) as stream:
        assert b"".join(iter(lambda: stream.read(size), b"")) == CONTENT


def flipped(packed):
    """Flips a bit in a compressed file's checksum, so that nothing else shows the damage."""
    return packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:]


@pytest.mark.parametrize(
    ("suffix", "damage", "said"),
    [
        *product(PACKERS, [lambda _: CONTENT], [r"\w.+"]),  # of another kind
        *product(PACKERS, [lambda packed: packed[:-6]], [r"\w.+"]),
        *product(PACKERS, [lambda packed: packed + packed[:-6]], [r"\w.+"]),
        (".gz", flipped, "CRC check failed.+"),
    ],
)
def test_damaged_compressed_file_is_named(tmp_path, suffix, damage, said):
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(damage(PACKERS[suffix](CONTENT)))
    complaint = rf"^cannot read .*x\.txt\{suffix}: {said}$"
    with pytest.raises(UserError, match=complaint), opened(str(path)) as stream:
        list(iter(lambda: stream.read(100), b""))


def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    complaint = rf"cannot read {tmp_path}: Is a directory"
    with pytest.raises(UserError, match=complaint), opened(str(tmp_path)):
        pass
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.zst").write_bytes(b"x")
    complaint = r"\.zst files needs pyarrow: make setup EXTRAS=data"
    with pytest.raises(UserError, match=complaint), opened(str(tmp_path / "x.zst")):
        pass


# --- which files ----------------------------------------------------------------------------------


def test_folder_of_texts_is_taken_in_order_without_hidden_and_empty_files(tmp_path):
    taken = {"a.txt": b"x", "a/x.md": b"x", "b.txt.gz": gzip.compress(b"x"), "c": b"x"}
    left_out = {".hidden": b"x", "a/.also": b"x", "empty.txt": b"", ".git/config": b"x"}
    write(tmp_path, taken | left_out)
    # "." sorts before "/": the order is that of the paths, on every system
    assert names(tmp_path, tmp_path) == [*taken]
    assert find_source(str(tmp_path)).format == "text"


def test_folder_with_documents_is_a_set_of_documents(tmp_path):
    write(tmp_path, {"b/1.jsonl": b"{}", "a.JSONL.gz": b"x", "c.ndjson": b"{}", "d.json": b"x"})
    assert names(tmp_path, tmp_path) == ["a.JSONL.gz", "b/1.jsonl", "c.ndjson", "d.json"]
    assert find_source(str(tmp_path)).format == "jsonl"


def test_texts_about_documents_are_left_out(tmp_path):
    write(tmp_path, {"a.parquet": b"x", "README.md": b"x", "LICENSE": b"x", "infos.json": b"{}"})
    assert names(tmp_path, tmp_path) == ["a.parquet"]


@pytest.mark.parametrize("other", ["notes.md", "d.parquet"])
def test_files_of_several_kinds_are_refused_and_a_pattern_chooses(tmp_path, other):
    write(tmp_path, {"a.jsonl": b"{}", "b/c.jsonl.gz": b"x", other: b"x"})
    for mixed in (tmp_path, f"{tmp_path}/**/*"):
        said = rf"has files of several kinds, .*\({tmp_path}/.*\) and .*: choose one by a pattern"
        with pytest.raises(UserError, match=said) as refused:
            listed(mixed)
        assert f"{tmp_path}/{other}" in str(refused.value)
    assert names(f"{tmp_path}/**/*.jsonl*", tmp_path) == ["a.jsonl", "b/c.jsonl.gz"]


def test_pattern_is_sorted_and_a_name_is_itself_first(tmp_path):
    write(tmp_path, dict.fromkeys(["2.txt", "10.txt", "a/3.txt", "[x].txt", "x.txt"], b"x"))

    def named(pattern):
        return names(f"{tmp_path}/{pattern}", tmp_path)

    assert named("**/*.txt") == ["10.txt", "2.txt", "[x].txt", "a/3.txt", "x.txt"]
    assert named("[x].txt") == ["[x].txt"]
    assert named("?.txt") == ["2.txt", "x.txt"]
    with pytest.raises(UserError, match="no such file"):
        named("*.md")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("x.json", "jsonl"), ("x.ndjson.zst", "jsonl"), ("x.parquet", "parquet"), ("x.bin", "text"),
        ("c4-train.00000-of-01024.json.gz", "jsonl"),
    ],
)  # fmt: skip
def test_format_of_a_named_file_is_in_its_name(tmp_path, name, format):
    (tmp_path / name).write_bytes(b"x")
    assert find_source(str(tmp_path / name)).format == format


# --- what is text ---------------------------------------------------------------------------------

NO_TEXTS = {
    "gzip": PACKERS[".gz"](ENGLISH.encode()),
    "utf-16": ENGLISH.encode("utf-16"),
    "utf-16-le": ENGLISH.encode("utf-16-le"),
    "latin-1": ACCENTS.encode("latin-1"),
    "cut": "é京".encode()[:-1],
    "random": np.random.default_rng(0).bytes(999),
    "controls": b"a few words\0\0" * 99,
}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("kind", "chunk"),
    [
        *product(NO_TEXTS, [2**18]),
        *product(["gzip", "utf-16", "latin-1", "cut"], [1, 3]),  # NULs are counted in long blocks
    ],
)
def test_what_is_no_text_is_named(tmp_path, monkeypatch, kind, raw, chunk):
    path = tmp_path / "x.txt"
    path.write_bytes(NO_TEXTS[kind])
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
    said = rf"^{path} is not UTF-8 \(.+\): if it is text, pass its encoding, such as --encoding utf"
    with pytest.raises(UserError, match=said):
        list(read_chunks(find_source(str(path)), raw=raw))


@pytest.mark.parametrize(
    "text", [CHINESE, ACCENTS, "\x1b[1mbold\x1b[0m\f\x1c\b\r\n", ENGLISH + "\0\x7f"]
)
def test_text_with_a_few_control_characters_is_text(tmp_path, text):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8", newline="")
    found = read_chunks(find_source(str(tmp_path / "x.txt")))
    assert "".join(chunk.text for chunk in found) == text


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "splits"),
    [
        (["train.txt", "valid.txt"], ["train", "val"]),
        (["Tiny-train.txt", "Tiny-validation.txt"], ["train", "val"]),
        (["train-00000-of-00002.txt", "train-00001-of-00002.txt", "val-0.txt"],
         ["train", "train", "val"]),
        (["train.txt", "more_train.txt"], [None, None]),  # nothing to validate on
        (["train.txt", "val.txt", "notes.txt"], [None] * 3),  # where would the third belong?
        (["trainer.txt", "value.txt"], [None, None]),
        (["w.train.txt", "w.valid.txt", "w.test.txt"], ["train", "val", "left out"]),
    ],
)  # fmt: skip
def test_names_tell_the_split_if_all_of_them_do(tmp_path, given, splits):
    write(tmp_path / "train", dict.fromkeys(given, b"x"))  # the folder's name tells nothing
    expected = {name: split for name, split in zip(given, splits) if split != "left out"}
    for found in (listed(tmp_path / "train"), listed(f"{tmp_path}/train/*.txt")):
        assert {file.path.rsplit("/", 1)[1]: file.split for file in found} == expected


def test_folders_tell_the_split_where_names_do_not(tmp_path):
    write(tmp_path, {"train/0.jsonl": b"{}", "val/0.jsonl": b"{}", "test/0.jsonl": b"{}"})
    for found in (listed(tmp_path), listed(f"{tmp_path}/*/*.jsonl")):
        splits = [(Path(file.path).parent.name, file.split) for file in found]
        assert splits == [("train", "train"), ("val", "val")]


def test_documents_beside_named_splits_must_say_where_they_belong(tmp_path):
    write(tmp_path, {"train.jsonl": b"{}", "val.jsonl": b"{}", "more.jsonl": b"{}"})
    with pytest.raises(UserError, match=r"more\.jsonl is named neither train nor validation"):
        listed(tmp_path)
