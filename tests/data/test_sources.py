"""Sources by name, path or pattern, of the hub, and files that are downloaded."""

import hashlib
import re
import sys
from unittest import mock

import pytest
import requests

from fastgpt.data import reading, sources
from fastgpt.data.download import published_file
from fastgpt.data.preparation import open_corpus
from fastgpt.data.sources import find_source, stdlib_source
from fastgpt.errors import UserError
from fastgpt.files import cache_dir


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """An empty folder of the user's own data, without what was read from the hub before."""
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    reading.load_splits.cache_clear()
    return tmp_path / "mine"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "My Notes.d"


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def names(given, root):
    return [file.path.removeprefix(f"{root}/") for file in find_source(str(given)).files]


def test_builtin_leaves_out_what_is_not_the_library(tmp_path, monkeypatch):
    kept = ["a.py", "a/test_x.py", "a/x.py", "b.py", "json/tool.py"]
    dropped = (
        "test/t.py a/tests/t.py site-packages/p.py encodings/cp037.py html/entities.py notes.txt"
        " _sysconfigdata__linux.py config-3.11-x86_64/python-config.py ensurepip/_bundled/x.py"
    )
    write(tmp_path / "lib", *reversed(kept), *dropped.split())
    with pytest.raises(UserError, match="holds only 5 bytes"):
        stdlib_source(tmp_path / "lib")
    monkeypatch.setattr(sources, "STDLIB_MIN_BYTES", 5)
    found = stdlib_source(tmp_path / "lib")
    assert [file.path for file in found.files] == [str(tmp_path / "lib" / name) for name in kept]
    assert (found.name, found.split, found.ends_lines) == ("builtin", "tail", False)


def test_files_of_a_named_set_in_the_data_folder_are_used(mine):
    write(mine, "fineweb/0.jsonl", "tinystories/train.txt", "tinystories/valid.txt")
    local = find_source("fineweb", field="content")
    assert (local.name, local.split, local.field) == ("fineweb", "hash", "content")
    assert [file.path for file in local.files] == [str(mine / "fineweb/0.jsonl")]
    stories = find_source("tinystories")
    assert (stories.separator, stories.split) == ("<|endoftext|>", "named")
    assert find_source("tinystories", separator="--").separator == "--"


@pytest.mark.parametrize(
    ("source", "options", "word"),
    [
        ("shakespear", {}, "did you mean 'shakespeare'"),
        ("missing/*.txt", {}, "no such file or folder"),
        ("", {}, "the source is empty"),
        ("{}/hidden", {}, "hidden' is empty"),
        ("builtin", {"separator": ""}, "the separator is empty"),
        ("hf:one/set", {"separator": "--"}, "for text files only"),
        ("{}/x.jsonl", {"encoding": "cp1252"}, "encoding cp1252 is for text files only"),
        *(("qqq", {"encoding": name}, "is unknown") for name in ("utf-9", "rot13", "\0", "")),
        *((name, {}, "hf:owner/name") for name in ("hf:set", "hf:a/b/c/d", "hf:a/b@")),
        ("{}/splits", {}, "more.jsonl is named neither train nor validation"),
    ],
)
def test_wrong_source_is_named(tmp_path, source, options, word):
    write(tmp_path, "hidden/.x", "x.jsonl")
    write(tmp_path / "splits", "train.jsonl", "val.jsonl", "more.jsonl")
    (tmp_path / "hidden" / "empty.txt").touch()
    with pytest.raises(UserError, match=re.escape(word)):
        find_source(source.format(tmp_path), **options)


@pytest.mark.parametrize(
    ("taken", "left_out", "form"),
    [
        # "." sorts before "/": paths are sorted as wholes, on every system
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


def test_files_of_several_kinds_are_refused_and_a_pattern_chooses(folder):
    write(folder, "a.jsonl", "b/c.jsonl.gz", "[a].jsonl", "notes.md")
    for mixed in (folder, f"{folder}/**/*"):
        with pytest.raises(UserError, match=f"several kinds.*{folder}/notes.md"):
            find_source(str(mixed))
    assert names(f"{folder}/**/*.jsonl*", folder) == ["[a].jsonl", "a.jsonl", "b/c.jsonl.gz"]
    assert names(f"{folder}/[a].jsonl", folder) == ["[a].jsonl"]  # a name is itself first
    assert names(f"{folder}/?.jsonl", folder) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("given", "splits"),
    [
        ("Tiny-train.txt Tiny-validation.txt", ["train", "val"]),
        ("train-0-of-2.txt train-1-of-2.txt val-0.txt", ["train", "train", "val"]),
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


@pytest.fixture
def load(monkeypatch):
    """Replaces the network by columns of made-up splits; returns a mock of the requests."""
    datasets = pytest.importorskip("datasets")

    def serve(size=None, **splits):
        found = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
        streams = {name: rows.to_iterable_dataset() for name, rows in found.items()}
        asked = mock.Mock(side_effect=lambda streaming, **_: streams if streaming else found)
        about = mock.Mock(info=mock.Mock(size_in_bytes=size))
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda **_: about)
        monkeypatch.setattr(datasets, "load_dataset", asked)
        return asked

    return serve


def texts(source):
    return [chunk.text for chunk in reading.read_chunks(source)]


@pytest.mark.parametrize("size", [None, 2**60])  # which no disk has: it is streamed
def test_name_gives_repository_configuration_and_revision(load, monkeypatch, size):
    monkeypatch.setattr(reading, "BATCH_ROWS", 2)
    asked = load(size=size, train={"id": [1, 2, 3, 4], "content": ["a", None, "", "e"]})
    source = find_source("hf:one/My.Set/en-10BT@refs/convert", field="content")
    assert texts(source) == ["a", "e"]
    expected = {"path": "one/My.Set", "name": "en-10BT", "revision": "refs/convert"}
    asked.assert_called_once_with(**expected, streaming=size is not None)
    assert (source.name, source.split, source.plain) == ("my", "hash", False)
    with pytest.raises(UserError, match="has no column 'id' of text"):
        texts(find_source("hf:one/My.Set/en-10BT@refs/convert", field="id"))


@pytest.mark.parametrize("validation", ["validation", "valid", "val"])
def test_published_validation_split_is_kept(load, validation):
    load(**{"test": {"text": ["t"]}, validation: {"text": ["v"]}, "train": {"text": ["a", "b"]}})
    source = find_source("tinystories")
    assert [file.split for file in source.files] == ["train", "val"]
    assert texts(source) == ["a", "b", "v"]
    corpus = open_corpus("tinystories", tokenizer="bytes", val_fraction=0.3)
    assert corpus.tokenizer.decode(corpus.train[:]) == "a\nb\n"


def test_set_that_cannot_be_had_is_named(load, monkeypatch, mine):
    load(test={"text": ["a"]}, dev={"text": ["b"]})
    with pytest.raises(UserError, match=f"splits test, dev: expected train.*{mine / 'fineweb'}"):
        find_source("fineweb")
    offline = mock.Mock(side_effect=ConnectionError("Couldn't reach\nthe hub"))
    monkeypatch.setattr("datasets.load_dataset_builder", offline)
    with pytest.raises(UserError, match=r"\(Couldn't reach the hub\)"):
        find_source("fineweb")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the package datasets"):
        find_source("fineweb")


def fetch(content=b"content"):
    sha256 = hashlib.sha256(content).hexdigest()
    return published_file("x.bin", "http://x/x.bin", sha256=sha256, what="mine", instead="x.bin")


@pytest.fixture
def answer(monkeypatch):
    response = requests.Response()
    response.status_code, response._content = 200, b"content"
    monkeypatch.setattr(requests, "get", mock.Mock(return_value=response))
    return response


def test_file_is_fetched_once_and_replaced_if_it_is_another(answer):
    path = cache_dir() / "x.bin"
    assert [fetch(), fetch()] == [path] * 2
    assert (path.read_bytes(), requests.get.call_count) == (b"content", 1)
    path.write_bytes(b"another")
    assert fetch().read_bytes() == b"content"
    assert [*cache_dir().iterdir()] == [path]


def test_own_file_is_taken_and_must_be_the_published_one(answer, mine):
    write(mine, "x.bin")
    assert fetch(b"x") == mine / "x.bin"
    with pytest.raises(UserError, match=r"x\.bin is not mine: its sha256 is .*, expected "):
        fetch()
    assert requests.get.call_count == 0


def test_failed_download_is_told_and_leaves_nothing(answer, mine):
    with pytest.raises(UserError, match="it has sha256 "):
        fetch(b"other")
    answer.status_code = 404
    with pytest.raises(UserError, match=f"^put x.bin into {mine} .*: cannot download .*404"):
        fetch()
    assert [*cache_dir().iterdir()] == []
    cache_dir().rmdir()
    cache_dir().touch()
    with pytest.raises(UserError, match=r"cannot write .*cache/x"):
        fetch()
