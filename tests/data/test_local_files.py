import gzip
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fastgpt.data import local_files, reading
from fastgpt.data.local_files import list_files
from fastgpt.data.reading import opened
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
    return list_files(str(given), "utf-8")


def names(given, root):
    return [file.path.removeprefix(f"{root}/") for file in listed(given)[0]]


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", *PACKERS])
@pytest.mark.parametrize("size", [7, 10**6])
def test_every_kind_of_file_is_unpacked_to_its_end(tmp_path, suffix, size):
    path = write_documents(tmp_path / f"x.txt{suffix}", [CONTENT.decode()])
    with opened(str(path)) as (stream, on_disk):
        assert b"".join(iter(lambda: stream.read(size), b"")) == CONTENT
        assert on_disk.tell() == path.stat().st_size


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
    with pytest.raises(UserError, match=complaint), opened(str(path)) as (stream, _):
        list(iter(lambda: stream.read(100), b""))


def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    complaint = rf"cannot read {tmp_path}: Is a directory"
    with pytest.raises(UserError, match=complaint), opened(str(tmp_path)):
        pass
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.zst").write_bytes(b"x")
    complaint = r"\.zst files needs pyarrow: pip install .*\[data\]"
    with pytest.raises(UserError, match=complaint), opened(str(tmp_path / "x.zst")):
        pass


# --- which files ----------------------------------------------------------------------------------


def test_folder_of_texts_is_taken_in_order_without_hidden_and_binary_files(tmp_path):
    taken = {"a.txt": b"x", "a/x.md": b"x", "b.txt.gz": gzip.compress(b"x"), "settings.json": b"{}"}
    passed_over = {
        ".hidden": b"x", "a/.also": b"x", "image.png": b"\x89PNG\0\0", "latin1.txt": b"caf\xe9",
        "not.gz": b"x", "binary.gz": gzip.compress(b"\0"),
    }  # fmt: skip
    not_counted = {"empty.txt": b"", ".git/config": b"x"}
    write(tmp_path, taken | passed_over | not_counted)
    found, skipped = listed(tmp_path)
    # "." sorts before "/": the order is that of the paths, on every system
    assert names(tmp_path, tmp_path) == ["a.txt", "a/x.md", "b.txt.gz", "settings.json"]
    assert {file.format for file in found} == {"text"}
    assert len(skipped) == len(passed_over)
    assert all(any(f"{tmp_path / name}" in reason for reason in skipped) for name in passed_over)


def test_folder_with_documents_is_a_set_of_documents(tmp_path):
    write(tmp_path, {"README.md": b"x", "info.json": b"{}", "b/1.jsonl": b"{}", "a.JSONL.gz": b"x",
                     "c.ndjson": b"{}", "d.parquet": b"x"})  # fmt: skip
    found, skipped = listed(tmp_path)
    assert names(tmp_path, tmp_path) == ["a.JSONL.gz", "b/1.jsonl", "c.ndjson", "d.parquet"]
    assert [file.format for file in found] == ["jsonl", "jsonl", "jsonl", "parquet"]
    assert [reason.split()[0] for reason in skipped] == [
        f"{tmp_path}/README.md", f"{tmp_path}/info.json"
    ]  # fmt: skip
    write(tmp_path, {"e.txt": b"x", "b/f.txt": b"x", "empty.txt": b"", "image.png": b"\x89PNG"})
    for mixed in (tmp_path, f"{tmp_path}/**/*"):
        said = r"2 texts and 4 files of JSON .*\*\*/\*\.txt\*'"
        with pytest.raises(UserError, match=said) as refused:
            listed(mixed)
        pattern = str(refused.value).split("'")[1]
        assert names(pattern, tmp_path) == ["b/f.txt", "e.txt"]


def test_folder_of_json_files_alone_is_a_set_of_documents(tmp_path):
    """A folder of .json files alone, as C4, is read as documents; beside others they are text."""
    write(tmp_path / "c4", {"c4-train.00000-of-01024.json.gz": b"x"})
    assert [file.format for file in listed(tmp_path / "c4")[0]] == ["jsonl"]
    write(tmp_path / "project", {"package.json": b"{}", "x.py": b"x"})
    assert {file.format for file in listed(tmp_path / "project")[0]} == {"text"}


def test_pattern_is_sorted_and_a_name_is_itself_first(tmp_path):
    write(tmp_path, dict.fromkeys(["2.txt", "10.txt", "a/3.txt", "[x].txt", "x.txt"], b"x"))

    def named(pattern):
        return names(f"{tmp_path}/{pattern}", tmp_path)

    assert named("**/*.txt") == ["10.txt", "2.txt", "[x].txt", "a/3.txt", "x.txt"]
    assert named("[x].txt") == ["[x].txt"]
    assert named("?.txt") == ["2.txt", "x.txt"]
    assert named("*.md") == []


@pytest.mark.parametrize(
    ("name", "format"),
    [("x.json", "jsonl"), ("x.ndjson.zst", "jsonl"), ("x.parquet", "parquet"), ("x.bin", "text")],
)
def test_format_of_a_named_file_is_in_its_name(tmp_path, name, format):
    (tmp_path / name).write_bytes(b"x")
    assert [file.format for file in listed(tmp_path / name)[0]] == [format]


# --- what is text ---------------------------------------------------------------------------------

NO_TEXTS = {
    "gzip": (PACKERS[".gz"](ENGLISH.encode()), "is not UTF-8 (byte 0x8B at offset 1)"),
    "utf-16": (ENGLISH.encode("utf-16"), "at offset 0): if it is text, pass its encoding, such as"
               " --encoding utf-16 (train.py: --data.encoding utf-16)"),
    "utf-16-le": (ENGLISH.encode("utf-16-le"), "is not text (50% control characters"),
    "latin-1": (ACCENTS.encode("latin-1"), "is not UTF-8 (byte 0xF6 at offset 2): if it is text,"
                " pass its encoding, such as --encoding cp1252"),
    "random": (np.random.default_rng(0).bytes(999), "is not UTF-8"),
    "controls": (b"a few words\1\2" * 99, "is not text (15% control characters from offset 0 on)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_TEXTS)
def test_what_is_no_text_is_named_and_skipped_beside_others(tmp_path, kind):
    path, (content, said) = tmp_path / "x.txt", NO_TEXTS[kind]
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        listed(path)
    assert str(raised.value).startswith(f"{path} is not ")
    assert said in str(raised.value)
    (tmp_path / "good.txt").write_text(ENGLISH)
    for source in (tmp_path, tmp_path / "*.txt"):
        assert listed(source)[1] == [str(raised.value)]


@pytest.mark.parametrize(
    "text", [CHINESE, ACCENTS, "\x1b[1mbold\x1b[0m\f\x1c\b\r\n", ENGLISH + "\0\x7f"]
)
def test_text_with_a_few_control_characters_is_text(tmp_path, text):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    assert listed(tmp_path)[1] == []


def test_character_cut_by_the_end_of_the_sample_is_still_text(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_BYTES", 4)
    monkeypatch.setattr(local_files, "CHECKED_BLOCKS", 1)
    write(tmp_path, {"a.txt": "café".encode(), "b.txt": b"caf\xe9", "c.txt": b"\xe9abcd"})
    assert names(tmp_path, tmp_path) == ["a.txt", "b.txt"]


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
        (["train_val.txt", "val.txt"], [None, None]),
        (["w.train.txt", "w.valid.txt", "w.test.txt"], ["train", "val", "left out"]),
    ],
)  # fmt: skip
def test_names_tell_the_split_if_all_of_them_do(tmp_path, given, splits):
    write(tmp_path / "train", dict.fromkeys(given, b"x"))  # the folder's name tells nothing
    expected = {name: split for name, split in zip(given, splits) if split != "left out"}
    for found in (listed(tmp_path / "train")[0], listed(f"{tmp_path}/train/*.txt")[0]):
        assert {file.path.rsplit("/", 1)[1]: file.split for file in found} == expected


def test_folders_tell_the_split_where_names_do_not(tmp_path):
    write(tmp_path, {"train/0.jsonl": b"{}", "val/0.jsonl": b"{}", "test/0.jsonl": b"{}"})
    for found, skipped in (listed(tmp_path), listed(f"{tmp_path}/*/*.jsonl")):
        splits = [(Path(file.path).parent.name, file.split) for file in found]
        assert splits == [("train", "train"), ("val", "val")]
        assert skipped == [f"{tmp_path}/test/0.jsonl is named as a test split"]


def test_documents_beside_named_splits_must_say_where_they_belong(tmp_path):
    write(tmp_path, {"train.jsonl": b"{}", "val.jsonl": b"{}", "more.jsonl": b"{}"})
    with pytest.raises(UserError, match=r"more\.jsonl is named neither train nor validation"):
        listed(tmp_path)
