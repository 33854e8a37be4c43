from pathlib import Path

import pytest

from fastgpt.data import download, sources
from fastgpt.data.sources import SHAKESPEARE_SHA256, find_source, stdlib_source
from fastgpt.errors import UserError


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Provides no files, and a network that must not be used."""
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))
    monkeypatch.setattr(download, "_download", None)
    monkeypatch.setattr(sources, "load_splits", None)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "My Notes.d"


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def names(given, root):
    return [file.path.removeprefix(f"{root}/") for file in find_source(str(given)).files]


# --- names ----------------------------------------------------------------------------------------


def test_builtin_leaves_out_what_is_not_the_library(tmp_path, monkeypatch):
    kept = ["a.py", "a/test_x.py", "a/x.py", "b.py", "json/tool.py"]
    dropped = [
        "test/t.py", "a/tests/t.py", "idlelib/idle_test/t.py", "site-packages/p.py",
        "encodings/cp037.py", "pydoc_data/topics.py", "html/entities.py", "notes.txt", "m.pyc",
        "_sysconfigdata__linux_x86_64-linux-gnu.py", "config-3.11-x86_64/python-config.py",
        "ensurepip/_bundled/x.py", "sitecustomize.py",
    ]  # fmt: skip
    write(tmp_path / "lib", *reversed(kept), *dropped)
    with pytest.raises(UserError, match="holds only 5 bytes"):
        stdlib_source(tmp_path / "lib")
    monkeypatch.setattr(sources, "STDLIB_MIN_BYTES", 5)
    found = stdlib_source(tmp_path / "lib")
    assert [file.path for file in found.files] == [str(tmp_path / "lib" / name) for name in kept]
    assert (found.name, found.split, found.ends_lines) == ("builtin", "tail", False)


def test_shakespeare_is_the_published_file(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(download, "_download", lambda *args: asked.append(args) or b"To be")
    [file] = find_source("shakespeare").files
    assert file.path == str(tmp_path / "cache" / "tinyshakespeare.txt")
    [(url, sha256, _)] = asked
    assert url.endswith("/tinyshakespeare/input.txt")
    assert sha256 == SHAKESPEARE_SHA256
    write(tmp_path / "mine", "tinyshakespeare.txt")
    with pytest.raises(UserError, match="is not tiny shakespeare"):
        find_source("shakespeare")


def test_files_of_a_named_set_in_the_data_folder_are_used(tmp_path):
    write(tmp_path / "mine", "fineweb/0.jsonl", "tinystories/train.txt", "tinystories/valid.txt")
    local = find_source("fineweb", field="content")
    assert (local.name, local.split, local.field) == ("fineweb", "hash", "content")
    assert [file.path for file in local.files] == [str(tmp_path / "mine/fineweb/0.jsonl")]
    stories = find_source("tinystories")
    assert (stories.separator, stories.split) == ("<|endoftext|>", "named")
    assert find_source("tinystories", separator="--").separator == "--"


@pytest.mark.parametrize(
    ("source", "options", "word"),
    [
        ("shakespear", {}, "did you mean 'shakespeare'"),
        ("qqq", {}, "unknown corpus 'qqq'"),
        ("corpora/missing.txt", {}, "no such file or folder"),
        ("missing/*.txt", {}, "no such file or folder"),
        ("", {}, "the source is empty"),
        ("{}/empty.txt", {}, "empty.txt' is empty"),
        ("{}/hidden", {}, "hidden' is empty"),
        ("{}/empty.txt", {"separator": ""}, "the separator is empty"),
        ("builtin", {"separator": "--"}, "separator '--' is for text files only"),
        ("hf:one/set", {"separator": "--"}, "for text files only"),
        ("{}/x.jsonl", {"encoding": "cp1252"}, "encoding cp1252 is for text files only"),
        *(("qqq", {"encoding": name}, "is unknown") for name in ("utf-9", "rot13", "\0", "")),
    ],
)
def test_wrong_source_is_named(tmp_path, source, options, word):
    write(tmp_path, "hidden/.x", "x.jsonl")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError) as raised:
        find_source(source.format(tmp_path), **options)
    assert word in str(raised.value)


# --- which files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "left_out", "form"),
    [
        # "." sorts before "/": the order is that of the paths, on every system
        ("a.txt a/x.md b.txt.gz c", ".hidden a/.also .git/config", "text"),
        ("a.JSONL.gz b/1.jsonl c4.00000-of-01024.json.gz d.ndjson.zst", "", "jsonl"),
        ("a.parquet", "README.md LICENSE infos.json", "parquet"),
        ("a.arrow", "", "arrow"),
    ],
)
def test_folder_gives_its_files_in_order_and_their_format(folder, taken, left_out, form):
    write(folder, *taken.split(), *left_out.split())
    (folder / "empty.txt").touch()
    found = find_source(str(folder))
    assert (found.name, found.format) == ("my-notes", form)
    assert names(folder, folder) == taken.split()


@pytest.mark.parametrize("other", ["notes.md", "d.parquet"])
def test_files_of_several_kinds_are_refused_and_a_pattern_chooses(tmp_path, other):
    write(tmp_path, "a.jsonl", "b/c.jsonl.gz", other)
    for mixed in (tmp_path, f"{tmp_path}/**/*"):
        with pytest.raises(UserError, match="several kinds") as refused:
            find_source(str(mixed))
        assert f"{tmp_path}/{other}" in str(refused.value)
    assert names(f"{tmp_path}/**/*.jsonl*", tmp_path) == ["a.jsonl", "b/c.jsonl.gz"]


def test_pattern_is_sorted_and_a_name_is_itself_first(tmp_path):
    write(tmp_path, "2.txt", "10.txt", "a/3.txt", "[x].txt", "x.txt")
    expected = ["10.txt", "2.txt", "[x].txt", "a/3.txt", "x.txt"]
    assert names(f"{tmp_path}/**/*.txt", tmp_path) == expected
    assert names(f"{tmp_path}/[x].txt", tmp_path) == ["[x].txt"]
    assert names(f"{tmp_path}/?.txt", tmp_path) == ["2.txt", "x.txt"]


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "splits"),
    [
        ("Tiny-train.txt Tiny-validation.txt", ["train", "val"]),
        ("train-0-of-2.txt train-1-of-2.txt val-0.txt", ["train", "train", "val"]),
        ("train.txt more_train.txt", [None, None]),  # nothing to validate on
        ("train.txt val.txt notes.txt", [None] * 3),  # where would the third belong?
        ("trainer.txt value.txt", [None, None]),
        ("w.train.txt w.valid.txt w.test.txt", ["train", "val", "left out"]),
        ("train/0.txt val/0.txt test/0.txt", ["train", "val", "left out"]),
    ],
)
def test_names_tell_the_split_if_all_of_them_do(tmp_path, given, splits):
    folder = tmp_path / "train"  # whose name tells nothing
    write(folder, *given.split())
    pairs = zip(given.split(), splits)
    expected = {f"{folder}/{name}": split for name, split in pairs if split != "left out"}
    for source in (folder, f"{folder}/**/*.txt"):
        assert dict(find_source(str(source)).files) == expected


def test_documents_beside_named_splits_must_say_where_they_belong(tmp_path):
    write(tmp_path, "train.jsonl", "val.jsonl", "more.jsonl")
    with pytest.raises(UserError, match=r"more\.jsonl is named neither train nor validation"):
        find_source(str(tmp_path))


@pytest.mark.parametrize(
    ("given", "options", "split", "ends_lines"),
    [
        ("a.txt", {}, "tail", False),
        ("a.txt", {"separator": "--"}, "hash", False),
        ("a.jsonl", {}, "hash", False),
        ("a.txt b.txt", {}, "tail", True),
        ("train.txt val.txt", {}, "named", True),
        ("train.jsonl val.jsonl", {}, "named", True),
    ],
)
def test_what_is_held_out_follows_from_the_files(folder, given, options, split, ends_lines):
    write(folder, *given.split())
    found = find_source(str(folder / (given if " " not in given else "*")), **options)
    assert (found.split, found.ends_lines) == (split, ends_lines)
    assert found.plain == (split == "tail" or given == "train.txt val.txt")
    whole = find_source(str(folder), **options)
    assert (whole.ends_lines, whole.files) == (True, found.files)
    assert Path(found.files[0].path).parent == folder
