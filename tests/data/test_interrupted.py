"""Preparations that are killed, interrupted or refused, and begun again to the same bytes."""

import gc
import json
import os

import pytest

from fastgpt.data import reading, writing
from fastgpt.data.preparation import prepare
from fastgpt.errors import UserError
from tests.data.sets import contents, write_documents
from tests.processes import python
from tests.runs import files_of_at_most

DOCUMENTS = [f"Document {i}: naïve {'and so on ' * (i % 9)}" for i in range(150)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shrinks the batches of the tokenizer, so that even a short text has many."""
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100)


@pytest.fixture
def source(tmp_path):
    return write_documents(tmp_path / "x.jsonl", DOCUMENTS)


@pytest.fixture
def preparing(source, tmp_path):
    """Returns a function that prepares a text with fixed options, which arguments override.

    Its attribute `reports` lists the progress of the last call, in tokens.
    """

    def run(out="out", given=source, stop_after=None, **options):
        run.reports = []

        def report(tokens):
            run.reports.append(tokens)
            if len(run.reports) == stop_after:
                raise KeyboardInterrupt

        fixed = {"tokenizer": "bytes", "val_fraction": 0.3, "shard_tokens": 800, "workers": 2}
        return prepare(str(given), tmp_path / out, **{**fixed, "report": report, **options})

    return run


@pytest.mark.parametrize("given", ["folder", pytest.param("documents", marks=pytest.mark.slow)])
def test_killed_wherever_it_touches_the_disk_nothing_looks_whole(tmp_path, given):
    options = {"tokenizer": "chars", "shard_tokens": 50, "val_fraction": 0.3}
    if given == "folder":
        source = tmp_path / "notes"
        source.mkdir()
        for name in "abc":  # each without its last newline
            (source / name).write_text(f"file {name}: {'some words naïve and ' * 3}end")
    else:
        source = write_documents(tmp_path / "y.jsonl", DOCUMENTS[:12])
        options |= {"tokenizer": "bpe", "vocab_size": 280}
    done = python("-m", "tests.data.killed_prepare", source, tmp_path, json.dumps(options))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["kills"] > 25
    assert found["again"] > 5
    assert len(found["files"]) >= 5


def test_ctrl_c_leaves_nothing_and_the_next_call_begins_again(preparing, tmp_path):
    whole, before = contents(preparing("whole")), sorted(tmp_path.glob("[!.]*"))
    with pytest.raises(KeyboardInterrupt):
        preparing(stop_after=20)
    assert sorted(tmp_path.glob("[!.]*")) == before
    assert contents(preparing()) == whole
    (tmp_path / "other.incomplete").mkdir()  # of a killed process
    (tmp_path / "other.incomplete" / "train_000000.bin").write_bytes(b"x" * 9999)
    assert contents(preparing("other")) == whole


def test_full_disk_is_told(preparing):
    whole = contents(preparing("whole", shard_tokens=3000))
    said = r"^cannot write .*out: File too large$"
    with files_of_at_most(3000), pytest.raises(UserError, match=said) as raised:
        preparing(shard_tokens=3000)
    del raised  # with the files it left open, whose last bytes must not come after all
    gc.collect()
    assert contents(preparing(shard_tokens=3000)) == whole


def test_bad_document_is_named_by_its_line_and_can_be_mended(source, preparing, tmp_path):
    whole, good = contents(preparing("whole")), source.read_bytes()
    source.write_bytes(good.replace(good.splitlines()[99], b"{"))
    with pytest.raises(UserError, match=r"x\.jsonl line 100: expected a JSON object"):
        preparing()
    assert [*tmp_path.glob("out*")] == []
    source.write_bytes(good)
    assert contents(preparing()) == whole


def test_second_process_for_the_same_place_is_refused_at_once(preparing):
    refused = []

    def report(tokens):
        if len(refused) < 3:
            with pytest.raises(UserError, match=r"another process is preparing .*out: wait"):
                preparing()
            refused.append(tokens)

    out = preparing(report=report)
    assert len(refused) == 3
    assert contents(out) == contents(preparing("whole"))


def test_place_that_is_taken_is_refused_and_kept(preparing, source, tmp_path):
    preparing()
    (tmp_path / "empty").mkdir()
    preparing("empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    before = contents(tmp_path)
    for taken in ("full", source.name):
        with pytest.raises(UserError, match="is not an empty directory"):
            preparing(taken)
    for taken in ("out", "empty"):
        with pytest.raises(UserError, match=r"holds another preparation: use another folder or re"):
            preparing(taken, tokenizer="chars")
    assert contents(tmp_path) == before


def test_the_same_request_for_a_complete_directory_does_nothing(preparing, tmp_path, caplog):
    out = preparing()
    before = contents(tmp_path)
    assert preparing() == out
    assert preparing.reports == []
    assert "out is complete already: nothing is left to do" in caplog.text
    assert contents(tmp_path) == before


def test_mount_point_is_refused_before_the_work(preparing, tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    monkeypatch.setattr("pathlib.Path.is_mount", lambda _: True)
    with pytest.raises(UserError, match="out is a mount point: use a folder inside it"):
        preparing()
    assert preparing.reports == []


def test_link_to_a_folder_is_written_through(preparing, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert preparing() == tmp_path / "elsewhere"
    assert contents(tmp_path / "out") == contents(preparing("whole"))
    assert (tmp_path / "out").is_symlink()
