from pathlib import Path

import pytest

from fastgpt.data import download, sources
from fastgpt.data.sources import SHAKESPEARE_SHA256, find_source, stdlib_source
from fastgpt.errors import UserError
from tests.data.sets import write_documents


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """Provides no files, and a network that must not be used."""
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))
    monkeypatch.setattr(download, "_download", None)
    monkeypatch.setattr(sources, "load_splits", None)


# --- names ----------------------------------------------------------------------------------------


def test_builtin_leaves_out_what_is_not_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "STDLIB_MIN_BYTES", 1)
    kept = {"b.py": "B", "a/x.py": "X", "a.py": "A", "a/test_x.py": "T", "json/tool.py": "J"}
    dropped = [
        "test/t.py", "a/tests/t.py", "idlelib/idle_test/t.py", "site-packages/p.py",
        "encodings/cp037.py", "pydoc_data/topics.py", "html/entities.py", "notes.txt", "m.pyc",
        "_sysconfigdata__linux_x86_64-linux-gnu.py", "config-3.11-x86_64/python-config.py",
        "ensurepip/_bundled/x.py", "sitecustomize.py",
    ]  # fmt: skip
    for name, content in {**kept, **dict.fromkeys(dropped, "?")}.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(content)
    found = stdlib_source(tmp_path / "lib")
    assert "".join(Path(file.path).read_text() for file in found.files) == "ATXBJ"
    assert (found.name, found.split, found.ends_lines) == ("builtin", "tail", False)


def test_shakespeare_is_the_published_file(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(download, "_download", lambda *args: asked.append(args) or b"To be")
    [file] = find_source("shakespeare").files
    assert file.path == str(tmp_path / "cache" / "tinyshakespeare.txt")
    [(url, sha256, instead)] = asked
    assert url.endswith("/tinyshakespeare/input.txt")
    assert (sha256, instead) == (SHAKESPEARE_SHA256, "that file, as tinyshakespeare.txt,")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tinyshakespeare.txt").write_text("To be")
    with pytest.raises(UserError, match=r"tinyshakespeare\.txt is not tiny shakespeare"):
        find_source("shakespeare")


@pytest.mark.parametrize("name", sources.HUB)
def test_files_of_a_named_set_in_the_data_folder_are_used(tmp_path, name):
    (tmp_path / "mine" / name).mkdir(parents=True)
    path = write_documents(tmp_path / "mine" / name / "0.jsonl", ["one"])
    local = find_source(name, field="content")
    assert (local.name, local.split, local.field) == (name, "hash", "content")
    assert [file.path for file in local.files] == [str(path)]


def test_tinystories_as_published_are_documents_split_by_their_names(tmp_path):
    folder = tmp_path / "mine" / "tinystories"
    folder.mkdir(parents=True)
    for split in ("train", "valid"):
        (folder / f"TinyStoriesV2-GPT4-{split}.txt").write_text("A\n<|endoftext|>\nB\n")
    found = find_source("tinystories")
    assert (found.separator, found.split) == ("<|endoftext|>", "named")
    assert [file.split for file in found.files] == ["train", "val"]


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options", "split", "ends_lines"),
    [
        (["a.txt"], {}, "tail", False),
        (["a.txt"], {"separator": "--"}, "hash", False),
        (["a.jsonl"], {}, "hash", False),
        (["a.txt", "b.txt"], {}, "tail", True),
        (["train.txt", "val.txt"], {}, "named", True),
        (["train.jsonl", "val.jsonl"], {}, "named", True),
    ],
)
def test_what_is_held_out_follows_from_the_files(tmp_path, names, options, split, ends_lines):
    (tmp_path / "My Notes.d").mkdir()
    for name in names:
        write_documents(tmp_path / "My Notes.d" / name, ["one"])
    name = names[0] if len(names) == 1 else "*"
    found = find_source(str(tmp_path / "My Notes.d" / name), **options)
    assert (found.split, found.ends_lines) == (split, ends_lines)
    assert found.plain == (split == "tail" or names[0] == "train.txt")
    folder = find_source(str(tmp_path / "My Notes.d"), **options)
    assert (folder.name, folder.ends_lines) == ("my-notes", True)
    assert folder.files == found.files


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("shakespear", "unknown corpus 'shakespear'; did you mean 'shakespeare'"),
        ("qqq", "unknown corpus 'qqq' .expected one of 'builtin', 'shakespeare', 'tinystories'"),
        ("corpora/missing.txt", "source 'corpora/missing.txt': no such file or folder"),
        ("missing/*.txt", "source 'missing/.*': no such file or folder"),
        ("", "the source is empty"),
    ],
)
def test_unknown_source_is_named(source, complaint):
    with pytest.raises(UserError, match=complaint):
        find_source(source)


def test_sources_with_nothing_to_read_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty\.txt' is empty$"):
        find_source(str(tmp_path / "empty.txt"))
    with pytest.raises(UserError, match="the separator is empty"):
        find_source(str(tmp_path / "empty.txt"), separator="")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_text("x")
    with pytest.raises(UserError, match=r"folder' is empty$"):
        find_source(str(tmp_path / "folder"))


@pytest.mark.parametrize("name", ["builtin", "shakespeare", "hf:one/set"])
def test_separator_of_what_is_no_text_file_is_refused(name):
    with pytest.raises(UserError, match=f"separator '--' is for text files only, not for {name}"):
        find_source(name, separator="--")
