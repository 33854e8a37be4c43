import gzip
import sys
from itertools import product
from pathlib import Path

import pytest

from fastgpt.data.prepare import files
from fastgpt.data.prepare.files import folder_files, named_files, opened
from fastgpt.data.shards import shard_header, token_dtype
from fastgpt.errors import UserError
from tests.data.sets import PACKERS, write_documents

CONTENT = "One line, naïve.\r\nAnother.\n".encode() * 50

SHARD = bytes(shard_header(1, token_dtype(256))) + b"\0\0"


def write(root, contents):
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def names(found, root):
    return [file.path.removeprefix(f"{root}/") for file in found]


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", *PACKERS])
@pytest.mark.parametrize("size", [7, 10**6])
def test_every_kind_of_file_is_unpacked_to_its_end(tmp_path, suffix, size):
    path = write_documents(tmp_path / f"x.txt{suffix}", [CONTENT.decode()])
    with opened(str(path)) as (stream, on_disk):
        found = b""
        while block := stream.read(size):
            found += block
        assert on_disk.tell() == path.stat().st_size
    assert found == CONTENT
    with opened(str(path)) as (stream, _):
        assert list(stream) == CONTENT.splitlines(keepends=True)


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
    found, skipped = folder_files(tmp_path)
    # "." sorts before "/": the order is that of the paths, on every system
    assert names(found, tmp_path) == ["a.txt", "a/x.md", "b.txt.gz", "settings.json"]
    assert {file.format for file in found} == {"text"}
    assert len(skipped) == len(passed_over)
    assert all(any(f"{tmp_path / name}" in reason for reason in skipped) for name in passed_over)


def test_folder_with_documents_is_a_set_of_documents(tmp_path):
    write(tmp_path, {"README.md": b"x", "info.json": b"{}", "b/1.jsonl": b"{}", "a.JSONL.gz": b"x",
                     "c.ndjson": b"{}", "d.parquet": b"x"})  # fmt: skip
    found, skipped = folder_files(tmp_path)
    assert names(found, tmp_path) == ["a.JSONL.gz", "b/1.jsonl", "c.ndjson", "d.parquet"]
    assert [file.format for file in found] == ["jsonl", "jsonl", "jsonl", "parquet"]
    assert [reason.split()[0] for reason in skipped] == [
        f"{tmp_path}/README.md", f"{tmp_path}/info.json"
    ]  # fmt: skip
    write(tmp_path, {"e.txt": b"x", "b/f.txt": b"x", "empty.txt": b"", "image.png": b"\x89PNG"})
    with pytest.raises(
        UserError, match=r"2 texts and 4 files of JSON .*\*\*/\*\.txt\*'"
    ) as refused:
        folder_files(tmp_path)
    pattern = str(refused.value).split("'")[1]
    assert names(named_files(pattern)[0], tmp_path) == ["b/f.txt", "e.txt"]


def test_character_cut_by_the_end_of_the_sample_is_still_text(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SNIFFED_BYTES", 4)
    write(tmp_path, {"a.txt": "café".encode(), "b.txt": b"caf\xe9", "c.txt": b"\xe9abcd"})
    assert names(folder_files(tmp_path)[0], tmp_path) == ["a.txt", "b.txt"]


def test_pattern_is_sorted_and_a_name_is_itself_first(tmp_path):
    write(tmp_path, dict.fromkeys(["2.txt", "10.txt", "a/3.txt", "[x].txt", "x.txt"], b"x"))

    def named(pattern):
        return names(named_files(f"{tmp_path}/{pattern}")[0], tmp_path)

    assert named("**/*.txt") == ["10.txt", "2.txt", "[x].txt", "a/3.txt", "x.txt"]
    assert named("[x].txt") == ["[x].txt"]
    assert named("?.txt") == ["2.txt", "x.txt"]
    assert named("a") == named("*.md") == []


def test_pattern_passes_over_what_is_no_text(tmp_path):
    write(tmp_path, {"a.txt": b"x", "b.txt": b"caf\xe9", "c.txt": b""})
    found, skipped = named_files(f"{tmp_path}/*.txt")
    assert (names(found, tmp_path), len(skipped)) == (["a.txt"], 2)


def test_folder_of_json_lines_alone_is_a_set_of_documents(tmp_path):
    """A folder of JSON lines alone is read as documents, a project's .json file as text."""
    lines = gzip.compress(b'{"text": "a"}\n{"text": "b"}\n')
    write(tmp_path / "c4", {"c4-train.00000-of-01024.json.gz": lines})
    assert [file.format for file in folder_files(tmp_path / "c4")[0]] == ["jsonl"]
    write(tmp_path / "project", {"package.json": b'{\n "name": 1}'})
    assert [file.format for file in folder_files(tmp_path / "project")[0]] == ["text"]


@pytest.mark.parametrize(
    ("content", "pattern", "complaint"),
    [
        ({"x_train_0.bin": SHARD}, "*.bin", r"x_train_0\.bin is a token shard: use the folder"),
        ({"x.bin": SHARD}, "x.bin", r"x\.bin is a token shard"),
        ({"x.txt.bz2": b"x"}, "x.txt.bz2", r"bz2: expected text, \.jsonl or \.parquet"),
        ({"a.txt": b"x", "b.jsonl": b"{}"}, "*", r"matches both text and \.jsonl or \.parquet"),
    ],
)
def test_what_nobody_means_as_text_is_refused(tmp_path, content, pattern, complaint):
    write(tmp_path, content)
    with pytest.raises(UserError, match=complaint):
        named_files(f"{tmp_path}/{pattern}")


@pytest.mark.parametrize(
    ("name", "format"),
    [("x.json", "jsonl"), ("x.ndjson.zst", "jsonl"), ("x.parquet", "parquet"), ("x.bin", "text")],
)
def test_format_of_a_named_file_is_in_its_name(tmp_path, name, format):
    (tmp_path / name).write_bytes(b"x")
    assert [file.format for file in named_files(str(tmp_path / name))[0]] == [format]


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
    for found in (folder_files(tmp_path / "train")[0], named_files(f"{tmp_path}/train/*.txt")[0]):
        assert {file.path.rsplit("/", 1)[1]: file.split for file in found} == expected


def test_folders_tell_the_split_where_names_do_not(tmp_path):
    write(tmp_path, {"train/0.jsonl": b"{}", "val/0.jsonl": b"{}", "test/0.jsonl": b"{}"})
    for found, skipped in (folder_files(tmp_path), named_files(f"{tmp_path}/*/*.jsonl")):
        splits = [(Path(file.path).parent.name, file.split) for file in found]
        assert splits == [("train", "train"), ("val", "val")]
        assert skipped == [f"{tmp_path}/test/0.jsonl is named as a test split"]


def test_documents_beside_named_splits_must_say_where_they_belong(tmp_path):
    write(tmp_path, {"train.jsonl": b"{}", "val.jsonl": b"{}", "more.jsonl": b"{}"})
    with pytest.raises(UserError, match=r"more\.jsonl is named neither train nor validation"):
        folder_files(tmp_path)
