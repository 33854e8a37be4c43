"""Corpora: prepared ones, those in the cache, and their verification."""

import hashlib
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fastgpt.data import preparation
from fastgpt.data.__main__ import main
from fastgpt.data.preparation import open_corpus, prepare
from fastgpt.data.sources import SHAKESPEARE_SHA256
from fastgpt.data.tokenizers import CharTokenizer
from fastgpt.errors import UserError
from fastgpt.files import cache_dir
from tests.data.sets import flip, prepared, same_times, texts, write_shard
from tests.runs import before_each, one_line_error

TEXT = "".join(f"line {i} of the text, naïve\n" for i in range(100))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "My Notes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def opened(source, tokenizer="auto", val_fraction=0.1, **options):
    return open_corpus(str(source), tokenizer=tokenizer, val_fraction=val_fraction, **options)


def entries():
    return sorted(path.name for path in (cache_dir() / "corpora").glob("[!.]*"))


def text_of(corpus):
    return corpus.tokenizer.decode(corpus.train[:]) + corpus.tokenizer.decode(corpus.val[:])


def test_builtin_is_the_standard_library():
    corpus = opened("builtin")
    data = b"".join(bytes(tokens[:].astype(np.uint8)) for tokens in (corpus.train, corpus.val))
    assert corpus.sha256 == hashlib.sha256(data).hexdigest()
    assert 7_000_000 < len(data) < 12_000_000
    assert (corpus.python, corpus.tokenizer.kind) == (platform.python_version(), "bytes")
    assert len(corpus.val) == pytest.approx(len(data) * 0.1, abs=1)


def test_shakespeare_is_split_as_everyone_splits_it(shakespeare):
    corpus = opened("shakespeare")
    assert (len(corpus.train), len(corpus.val)) == (1_003_854, 111_540)
    assert (corpus.tokenizer.kind, corpus.tokenizer.vocab_size) == ("chars", 65)
    assert (corpus.sha256, corpus.python) == (SHAKESPEARE_SHA256, None)
    assert text_of(corpus) == shakespeare.read_text()


def test_split_counts_characters_and_bytes_are_known(text_file):
    chars = opened(text_file, tokenizer="chars", val_fraction=0.25)
    cut = int(len(TEXT) * 0.75)
    assert chars.tokenizer.decode(chars.train[:]) == TEXT[:cut]
    assert chars.tokenizer.decode(chars.val[:]) == TEXT[cut:]
    expected = len(TEXT[cut:].encode()) / len(TEXT[cut:])
    assert chars.val_bytes_per_token == pytest.approx(expected)
    assert chars.name == "my-notes"


def test_encoding_gives_the_same_tokens_and_an_entry_of_its_own(text_file):
    expected = opened(text_file)
    text_file.write_text(TEXT, encoding="utf-16")
    assert opened(text_file, encoding="UTF16").fingerprint == expected.fingerprint
    text_file.write_text(TEXT, encoding="latin-1")
    for name in ("cp1252", "iso-8859-7"):
        found = opened(text_file, "chars", encoding=name)
        assert text_of(found) == TEXT.encode("latin-1").decode(name)
    assert len(entries()) == 4


@pytest.fixture
def directory(text_file, tmp_path):
    return prepare(str(text_file), tmp_path / "out", tokenizer="chars", val_fraction=0.2)


def test_prepared_directory_is_opened_as_it_was_made(directory, tmp_path):
    files = "manifest.json tokenizer.json train_000000.bin val_000000.bin"
    assert " ".join(sorted(path.name for path in directory.iterdir())) == files
    corpus = opened(directory, val_fraction=0.5)  # it is split already
    assert corpus.path == directory
    assert len(corpus.val) == len(TEXT) - int(len(TEXT) * 0.8)
    assert text_of(corpus) == TEXT
    assert corpus.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert not (cache_dir() / "corpora").exists()
    with pytest.raises(UserError, match="encoding cp1252 is for text files only"):
        opened(directory, encoding="cp1252")
    with pytest.raises(UserError, match="holds tokens already"):
        prepare(str(directory), tmp_path / "out2", tokenizer="auto", val_fraction=0.2)
    older = json.loads((directory / "manifest.json").read_text())
    del older["request"], older["files"], older["held_out"]
    (directory / "manifest.json").write_text(json.dumps(older))
    assert opened(directory).fingerprint == corpus.fingerprint


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("[]", "damaged"),
        ('{"format_version": 99}', "format 99, expected 2"),
        (lambda splits: splits["train"]["shards"][0].pop("sha256"), "damaged"),
        (lambda splits: splits["val"].update(bytes="1"), "damaged .*wrong type"),
        (lambda splits: splits["val"]["shards"][0].update(file="a/b.bin"), "damaged .*no file in"),
    ],
)
def test_damaged_manifest_is_named(directory, change, complaint):
    if callable(change):
        manifest = json.loads((directory / "manifest.json").read_text())
        change(manifest["splits"])
        change = json.dumps(manifest)
    (directory / "manifest.json").write_text(change)
    with pytest.raises(UserError, match=rf"manifest\.json.*{complaint}"):
        opened(directory)


def test_prepared_file_of_another_preparation_is_named(directory):
    shard = (directory / "val_000000.bin").read_bytes()
    write_shard(directory / "val_000000.bin", range(3))
    with pytest.raises(UserError, match=r"manifest\.json is damaged .*other numbers of tokens"):
        opened(directory)
    (directory / "val_000000.bin").write_bytes(shard)
    saved = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(saved, indent=1))
    with pytest.raises(UserError, match=r"tokenizer\.json was changed"):
        opened(directory)


def test_each_content_tokenizer_and_split_has_its_own_entry(text_file):
    found = [opened(text_file), opened(text_file, "chars"), opened(text_file, val_fraction=0.2)]
    assert found[0].sha256 == found[2].sha256
    text_file.write_text(TEXT + "more")
    found.append(opened(text_file))
    tokenizer = text_file.with_name("tokenizer.json")
    for chars in (TEXT + "more", TEXT + "more xyz"):
        CharTokenizer(chars).save(tokenizer)
        found.append(opened(text_file, str(tokenizer.parent)))
        assert found[-1].tokenizer.vocab_size == len(set(chars))
    for name in ("path", "fingerprint"):
        assert len({getattr(corpus, name) for corpus in found}) == 6
    assert len(entries()) == 6


@pytest.mark.parametrize("name", ["train_000000.bin", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda x: os.truncate(x, 100), lambda x: flip(x, -1)]
)
def test_damaged_entry_is_prepared_again(text_file, caplog, name, damage):
    path = opened(text_file).path / name
    damage(path)
    assert text_of(opened(text_file)) == TEXT
    assert "preparing the cached corpus again" in caplog.text
    assert len(entries()) == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_of_many_at_once_one_prepares_and_all_have_it(text_file, damaged, monkeypatch):
    if damaged:
        (opened(text_file).path / "manifest.json").write_text("{")
    written = []

    def count(source, settings, out, **_):
        written.append(out.name)
        time.sleep(0.1)  # so that whoever does not wait is seen

    before_each(monkeypatch, preparation, "write_directory", count)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: text_of(opened(text_file)), range(6)))
    assert found == [TEXT] * 6
    assert len(written) == len(entries()) == 1


def test_verify_finds_what_size_and_time_hide(tmp_path, capsys):
    folder = prepared(tmp_path / "stories", texts(120, longest=30), shard_tokens=2_000)
    count, path = len(list(folder.glob("*.bin"))), folder / "train_000002.bin"
    main([str(folder), "--verify"])
    assert f"verified: sha256 and ids of {count} shards" in capsys.readouterr().out
    status = path.stat()
    flip(path, status.st_size - 1, bit=2)
    same_times(path, status)
    main([str(folder)])
    assert f"{len(opened(folder).train):,}" in capsys.readouterr().out
    said = one_line_error(capsys, main, [str(folder), "--verify"])
    assert f"{path} is damaged: its sha256 is" in said
    assert "has no *train*.bin" in one_line_error(capsys, main, [str(tmp_path)])
