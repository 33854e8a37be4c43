import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fastgpt.config.config import DataConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.data import preparation
from fastgpt.data.preparation import open_corpus, prepare
from fastgpt.data.sources import SHAKESPEARE_SHA256
from fastgpt.data.tokenizers import CharTokenizer
from fastgpt.errors import UserError
from fastgpt.files import cache_dir
from fastgpt.train.data import sample_prompt
from tests.data.sets import read_ids, write_shard
from tests.processes import python
from tests.runs import before_each

TEXT = "".join(f"line {i} of the text, naïve\n" for i in range(100))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "My Notes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def opened(source, tokenizer="auto", val_fraction=0.1, **options):
    return open_corpus(str(source), tokenizer=tokenizer, val_fraction=val_fraction, **options)


def entries():
    """Lists the prepared corpora in the cache, without their lock files."""
    return sorted(path.name for path in (cache_dir() / "corpora").glob("[!.]*"))


def text_of(corpus):
    return corpus.tokenizer.decode(corpus.train[:]) + corpus.tokenizer.decode(corpus.val[:])


@pytest.fixture
def written(monkeypatch):
    """Records the names of the corpora that are prepared during a test, in order."""
    names = []

    def count(source, settings, out, **_):
        names.append(out.name)
        time.sleep(0.1)  # so that whoever does not wait is seen

    before_each(monkeypatch, preparation, "write_directory", count)
    return names


# --- splitting and tokenizing ---------------------------------------------------------------------


def test_builtin_is_the_standard_library_without_its_tables():
    corpus = opened("builtin")
    data = b"".join(bytes(tokens[:].astype(np.uint8)) for tokens in (corpus.train, corpus.val))
    assert corpus.sha256 == hashlib.sha256(data).hexdigest()
    assert 7_000_000 < len(data) < 12_000_000
    assert corpus.python == "{}.{}.{}".format(*sys.version_info[:3])
    assert (corpus.name, corpus.tokenizer.kind) == ("builtin", "bytes")
    assert corpus.val_bytes_per_token == 1
    assert len(corpus.val) == pytest.approx(len(data) * 0.1, abs=1)
    assert b"class JSONDecoder" in data
    assert b"decoding_table = (" not in data
    assert b"DO NOT EDIT" not in data


def test_shakespeare_is_split_as_everyone_splits_it(shakespeare):
    corpus = opened("shakespeare")
    assert (len(corpus.train), len(corpus.val)) == (1_003_854, 111_540)
    assert (corpus.tokenizer.kind, corpus.tokenizer.vocab_size) == ("chars", 65)
    assert corpus.tokenizer.encode("\n").tolist() == [0]
    assert corpus.sha256 == SHAKESPEARE_SHA256
    assert corpus.val_bytes_per_token == 1.0
    assert corpus.python is None
    text = shakespeare.read_text()
    assert corpus.tokenizer.decode(corpus.val[:]) == text[-111_540:]
    assert text_of(corpus) == text


def test_encoding_gives_the_same_tokens_and_an_entry_of_its_own(text_file):
    expected = opened(text_file)
    text_file.write_text(TEXT, encoding="utf-16")
    with pytest.raises(UserError, match=r"pass its encoding, such as --encoding utf-16 or cp1252"):
        opened(text_file)
    assert opened(text_file, encoding="UTF16").fingerprint == expected.fingerprint
    text_file.write_text(TEXT, encoding="latin-1")
    for name in ("cp1252", "iso-8859-7"):
        found = opened(text_file, "chars", encoding=name)
        assert text_of(found) == TEXT.encode("latin-1").decode(name)
    assert len(entries()) == 4


@pytest.mark.parametrize("name", ["utf-9", "rot13", "undefined", "\0", ""])
def test_unknown_encoding_is_named_before_anything_is_read(name):
    with pytest.raises(
        UserError, match=r"^encoding .* is unknown: expected one of Python's text en"
    ):
        opened("missing", encoding=name)


@pytest.mark.parametrize("source", ["builtin", "x.jsonl", "prepared"])
def test_encoding_of_what_is_no_text_file_is_refused(text_file, tmp_path, source):
    (tmp_path / "x.jsonl").write_text("{}")
    prepare(str(text_file), tmp_path / "prepared")
    with pytest.raises(UserError, match=r"^encoding cp1252 is for text files only"):
        opened(source if source == "builtin" else tmp_path / source, encoding="cp1252")


@pytest.mark.parametrize(
    ("recipe", "changes", "prompt"),
    [
        ("baby", {}, "def "),
        ("shakespeare-cpu", {}, "\n"),
        ("baby", {"data": DataConfig(source="x.txt")}, "words of a"),
        ("shakespeare-cpu", {"data": DataConfig(source="x.txt")}, "words of a"),
    ],
)
def test_samples_continue_words_of_the_corpus_on_other_data(tmp_path, recipe, changes, prompt):
    (tmp_path / "x.txt").write_text("é" * 11 + " words of a book, and more", encoding="utf-8")
    config = replace(RECIPES[recipe][1], **changes)
    assert sample_prompt(config, opened(tmp_path / "x.txt", val_fraction=0.76)) == prompt


@pytest.mark.parametrize(
    ("text", "words", "length"),
    [("天地玄黃" * 99, 1, 16), ("one\n\ntwo\nsix\n" * 99, 3, 11), ("\n" * 99, 0, 1)],
)
def test_first_words_are_whole_and_of_the_text(tmp_path, text, words, length):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    found = opened(tmp_path / "x.txt", "chars", val_fraction=0.5).first_words()
    assert found in text
    assert (len(found.split()), len(found)) == (words, pytest.approx(length, abs=1))


def test_split_counts_characters_and_bytes_are_known(text_file):
    chars = opened(text_file, tokenizer="chars", val_fraction=0.25)
    cut = int(len(TEXT) * 0.75)
    assert chars.tokenizer.decode(chars.train[:]) == TEXT[:cut]
    assert chars.tokenizer.decode(chars.val[:]) == TEXT[cut:]
    expected = len(TEXT[cut:].encode()) / len(TEXT[cut:])
    assert chars.val_bytes_per_token == pytest.approx(expected)
    assert expected > 1
    assert chars.name == "my-notes"


# --- prepared directories -------------------------------------------------------------------------


def test_prepared_directory_is_opened_as_it_was_made(text_file, tmp_path):
    out = prepare(str(text_file), tmp_path / "out", tokenizer="chars", val_fraction=0.2)
    files = "manifest.json tokenizer.json train_000000.bin val_000000.bin"
    assert " ".join(sorted(path.name for path in out.iterdir())) == files
    corpus = opened(out, val_fraction=0.5)  # it is split already
    assert corpus.path == out
    assert len(corpus.val) == len(TEXT) - int(len(TEXT) * 0.8)
    assert text_of(corpus) == TEXT
    assert corpus.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert not (cache_dir() / "corpora").exists()
    # what earlier versions wrote: other entries, which are ignored, and a file
    older = json.loads((out / "manifest.json").read_text())
    del older["request"], older["files"], older["held_out"]
    older["source"] = {"given": str(text_file), "files": 1, "skipped_files": 0}
    older["splits"]["val"]["shards"][0]["crc32"] = [1]
    (out / "manifest.json").write_text(json.dumps(older))
    (out / "progress.json").write_text("{}")
    assert opened(out).fingerprint == corpus.fingerprint
    with pytest.raises(UserError, match="holds tokens already"):
        prepare(str(out), tmp_path / "out2", tokenizer="auto", val_fraction=0.2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"format_version": 2}', "damaged"),
        ('{"format_version": 99}', "format 99, expected 2"),
        (lambda manifest: manifest["splits"]["train"]["shards"][0].pop("sha256"), "damaged"),
        (lambda manifest: manifest["splits"]["val"].update(tokens=0), "damaged"),
    ],
)
def test_damaged_manifest_is_named(text_file, tmp_path, change, complaint):
    out = prepare(str(text_file), tmp_path / "out", tokenizer="bytes", val_fraction=0.1)
    if callable(change):
        change(manifest := json.loads((out / "manifest.json").read_text()))
        change = json.dumps(manifest)
    (out / "manifest.json").write_text(change)
    with pytest.raises(UserError, match=rf"manifest\.json.*{complaint}"):
        opened(out)


def test_prepared_file_of_another_preparation_is_named(text_file, tmp_path):
    out = prepare(str(text_file), tmp_path / "out", tokenizer="chars", val_fraction=0.2)
    shard = (out / "val_000000.bin").read_bytes()
    write_shard(out / "val_000000.bin", range(3))
    with pytest.raises(
        UserError, match=r"manifest\.json is damaged .*have other numbers of tokens"
    ):
        opened(out)
    (out / "val_000000.bin").write_bytes(shard)
    saved = json.loads((out / "tokenizer.json").read_text())
    (out / "tokenizer.json").write_text(json.dumps(saved, indent=1))
    with pytest.raises(UserError, match=r"tokenizer\.json was changed"):
        opened(out)


# --- the cache ------------------------------------------------------------------------------------


def test_each_content_tokenizer_and_split_has_its_own_entry(text_file):
    paths = [opened(text_file).path, opened(text_file, "chars").path]
    paths.append(opened(text_file, val_fraction=0.2).path)
    text_file.write_text(TEXT + "more")
    paths.append(opened(text_file).path)
    tokenizer = text_file.with_name("tokenizer.json")
    for chars in (TEXT + "more", TEXT + "more xyz"):
        CharTokenizer(chars).save(tokenizer)
        paths.append(opened(text_file, str(tokenizer.parent)).path)
        assert opened(text_file, str(tokenizer.parent)).tokenizer.vocab_size == len(set(chars))
    assert len(set(paths)) == len(entries()) == 6


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *product(
            ("train_000000.bin", "tokenizer.json", "manifest.json"),
            (Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-5])),
        ),
        ("train_000000.bin", lambda path: write_shard(path, read_ids(path)[:-1])),
        ("train_000000.bin", lambda path: write_shard(path, read_ids(path) ^ 1)),
    ],
)
def test_damaged_entry_is_prepared_again(text_file, caplog, name, damage):
    path = opened(text_file).path / name
    damage(path)
    assert text_of(opened(text_file)) == TEXT
    assert "preparing the cached corpus again" in caplog.text
    assert path.exists()
    assert len(entries()) == 1


def test_interrupted_preparation_leaves_nothing_that_looks_whole(text_file):
    for call in ("os.replace", "fastgpt.data.writing.encode"):
        interrupted = mock.patch(call, side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            opened(text_file)
        assert entries() == []
    assert text_of(opened(text_file)) == TEXT


@pytest.mark.parametrize("damaged", [False, True])
def test_of_many_at_once_one_prepares_and_all_have_it(text_file, damaged, written):
    if damaged:
        (opened(text_file).path / "manifest.json").write_text("{")
        written.clear()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda _: text_of(opened(text_file)), range(6)))
    assert texts == [TEXT] * 6
    assert len(written) == len(entries()) == 1


def test_two_processes_prepare_at_once(text_file):
    code = (
        "import sys; from fastgpt.data.preparation import open_corpus; "
        "print(open_corpus(sys.argv[1], tokenizer='auto', val_fraction=0.1).path)"
    )
    with ThreadPoolExecutor(2) as pool:
        printed = {done.stdout for done in pool.map(lambda _: python("-c", code, text_file), "ab")}
    assert printed == {f"{opened(text_file).path}\n"}
    assert len(entries()) == 1


def test_same_text_split_in_another_way_has_another_identity(text_file, tmp_path):
    corpora = [
        opened(prepare(str(text_file), tmp_path / str(fraction), val_fraction=fraction))
        for fraction in (0.1, 0.2)
    ]
    assert corpora[0].sha256 == corpora[1].sha256
    assert corpora[0].fingerprint != corpora[1].fingerprint
