"""`python -m fastgpt.data DIR` describes a dataset correctly and finds damage."""

import re

import numpy as np
import pytest

from fastgpt.data.__main__ import main
from fastgpt.data.preparation import open_corpus, prepare
from tests.data.sets import flip, prepared, same_times, texts, write_shard
from tests.runs import one_line_error

TEXTS = texts(120, longest=30)


@pytest.fixture
def stories(tmp_path):
    """Directory with 120 documents in several shards."""
    return prepared(tmp_path / "stories", TEXTS, shard_tokens=2_000)


@pytest.fixture
def shown(capsys):
    """Runs the command, which must succeed; returns its output."""

    def run(*argv):
        main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def row(out, name):
    """Returns the numbers in the row `name` of the printed table."""
    [line] = [line for line in out.splitlines() if re.match(rf"{name}  ", line)]
    return [float(n.replace(",", "")) for n in re.findall(r"[\d,]+\.?\d*", line)]


def test_counts_are_those_of_the_shards(stories, shown):
    corpus, out = open_corpus(str(stories), tokenizer="auto", val_fraction=0.1), shown(stories)
    both, eot_id = (corpus.train, corpus.val), corpus.tokenizer.eot_id
    documents = [(tokens[:] == eot_id).sum() for tokens in both]
    assert sum(documents) == 120
    sizes = [split["bytes"] for split in corpus.manifest["splits"].values()]
    assert sum(sizes) == sum(len(text.encode()) for text in TEXTS)
    assert row(out, "tokens") == [len(tokens) for tokens in both]
    assert row(out, "shards") == [len(list(stories.glob(f"{s}_*"))) for s in ("train", "val")]
    assert row(out, "documents") == documents
    assert row(out, "tokens per document") == [
        round(len(t) / n, 1) for t, n in zip(both, documents)
    ]
    assert row(out, "bytes of text") == sizes
    assert row(out, "bytes per token") == [round(n / len(t), 2) for t, n in zip(both, sizes)]
    assert f"vocabulary 257, end of text {eot_id}, uint16" in out
    assert f"sha256 {corpus.sha256}" in out


def test_text_or_shards_of_another_program_are_shown(tmp_path, shown, stories):
    (tmp_path / "x.txt").write_text("no documents. " * 20)
    out = shown(prepare(str(tmp_path / "x.txt"), tmp_path / "x"))
    assert "end of text none" in out
    assert "documents " not in out
    folder = tmp_path / "[bold] fineweb10B"
    folder.mkdir()
    write_shard(folder / "fineweb_train_000001.bin", np.arange(300) % 250)
    write_shard(folder / "fineweb_val_000000.bin", range(100))
    out = shown(folder, "--tokenizer", stories, "--verify")
    assert row(out, "tokens") == [300, 100]
    assert row(out, "documents") == [2, 1]
    assert str(folder) in out
    assert "verified: ids of 2 shards" in out


def test_verify_finds_what_size_and_time_hide(stories, shown, capsys):
    count = len(list(stories.glob("*.bin")))
    assert f"verified: sha256 and ids of {count} shards" in shown(stories, "--verify")
    path = stories / "train_000002.bin"
    status = path.stat()
    flip(path, status.st_size - 1, bit=2)
    same_times(path, status)
    assert "tokens" in shown(stories)
    said = one_line_error(capsys, main, [str(stories), "--verify"])
    assert f"{path} is damaged: its sha256 is" in said


@pytest.mark.parametrize(
    ("argv", "word"),
    [(["nowhere"], "no such folder"), (["."], "has no *train*.bin"), ([".", "--x"], "'--x'")],
)
def test_bad_input_is_one_line(capsys, argv, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert word in one_line_error(capsys, main, argv)
