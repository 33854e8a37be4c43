import hashlib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fastgpt import sources
from fastgpt.errors import UserError
from fastgpt.sources import SHAKESPEARE_SHA256, cache_dir, data_dir, read_source, read_stdlib


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """An empty cache, no files, and no network."""
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))

    def offline(url, timeout):
        assert timeout
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", offline)


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
    found = read_stdlib(tmp_path / "lib")
    assert found.data == b"ATXBJ"  # "." sorts before "/"
    assert found.files == len(kept)


def test_builtin_without_sources_says_so(tmp_path):
    with pytest.raises(UserError, match=r"python311\.zip holds only 0 bytes.*text file"):
        read_stdlib(tmp_path / "python311.zip")


def test_wrong_local_shakespeare_names_both_hashes(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tinyshakespeare.txt").write_text("To be")
    found = hashlib.sha256(b"To be").hexdigest()
    with pytest.raises(UserError, match=rf"tinyshakespeare\.txt.*{found}.*{SHAKESPEARE_SHA256}"):
        read_source("shakespeare")


def test_shakespeare_offline_says_what_to_put_where(tmp_path):
    where = str(tmp_path / "mine" / "tinyshakespeare.txt")
    with pytest.raises(UserError, match=rf"cannot download .*no route.*{where}.*FASTGPT_DATA"):
        read_source("shakespeare")


def test_shakespeare_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    served, requests = tmp_path / "served", []
    served.write_bytes(b"To be, or not")

    def serve(url, timeout):
        requests.append(url)
        return open(served, "rb")

    monkeypatch.setattr(urllib.request, "urlopen", serve)
    with pytest.raises(UserError, match=f"sent something else.*{SHAKESPEARE_SHA256}"):
        read_source("shakespeare")
    assert not (cache_dir() / "tinyshakespeare.txt").exists()
    monkeypatch.setattr(
        sources, "SHAKESPEARE_SHA256", hashlib.sha256(served.read_bytes()).hexdigest()
    )
    for _ in range(2):
        assert read_source("shakespeare").data == b"To be, or not"
    assert len(requests) == 2
    assert (cache_dir() / "tinyshakespeare.txt").read_bytes() == served.read_bytes()


def test_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    root = tmp_path / "notes"
    files = {
        "b.txt": b"second", "a/z.md": b"first\n", "c.txt": b"", ".hidden": b"secret",
        ".git/config": b"secret", "image.png": b"\x89PNG\0\0", "latin1.txt": b"caf\xe9",
    }  # fmt: skip
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    found = read_source(str(root))
    assert found.data == b"first\nsecond\n"
    assert (found.name, found.files, found.skipped) == ("notes", 2, 3)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("shakespear", "unknown corpus 'shakespear'; did you mean 'shakespeare'"),
        ("qqq", "unknown corpus 'qqq' .expected one of 'builtin', 'shakespeare', a file or"),
        ("corpora/missing.txt", "corpus 'corpora/missing.txt': no such file or folder"),
    ],
)
def test_unknown_source_is_named(source, complaint):
    with pytest.raises(UserError, match=complaint):
        read_source(source)


def test_empty_sources_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty\.txt' is empty"):
        read_source(str(tmp_path / "empty.txt"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_text("x")
    with pytest.raises(UserError, match=r"folder' is empty.*1 hidden"):
        read_source(str(tmp_path / "folder"))


def test_directories_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTGPT_DATA", "/x/data")
    assert data_dir() == Path("/x/data")
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FASTGPT_DATA")
    monkeypatch.delenv("FASTGPT_CACHE")
    assert data_dir() == Path("data")
    assert cache_dir() == Path.home() / ".cache" / "fastgpt"
