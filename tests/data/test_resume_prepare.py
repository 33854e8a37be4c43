"""Preparations that are killed, interrupted or refused, and go on to the same bytes."""

import gc
import json
import os

import pytest

from fastgpt.data import batches, reading
from fastgpt.data.preparation import prepare
from fastgpt.data.request import PROGRESS
from fastgpt.errors import UserError
from tests.data.sets import contents, write_documents
from tests.processes import python
from tests.runs import before_each, files_of_at_most

DOCUMENTS = [f"Document {i}: naïve {'and so on ' * (i % 9)}" for i in range(150)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shrinks the batches of the tokenizer, so that even a short text has many."""
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 300)
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

        def report(tokens, _):
            run.reports.append(tokens)
            if len(run.reports) == stop_after:
                raise KeyboardInterrupt

        fixed = {"tokenizer": "bytes", "val_fraction": 0.3, "shard_tokens": 800, "workers": 2}
        return prepare(str(given), tmp_path / out, **{**fixed, "report": report, **options})

    return run


@pytest.fixture
def interrupted(preparing):
    """Returns a function that prepares a text until Ctrl-C, and returns the progress so far."""

    def run(after, **options):
        with pytest.raises(KeyboardInterrupt):
            preparing(stop_after=after + 1, save_every_s=0, **options)
        return preparing.reports[-2] if after else 0

    return run


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["folder", pytest.param("documents", marks=pytest.mark.slow)])
def test_killed_wherever_it_touches_the_disk_it_goes_on_to_the_same_bytes(tmp_path, given):
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
    assert found["kills"] > 70
    assert found["again"] > 20
    assert len(found["files"]) >= 5


# --- Ctrl-C and errors ----------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_saved(interrupted, preparing, tmp_path):
    whole = contents(preparing("whole"))
    kept = interrupted(20)
    assert kept > 1000
    assert not (tmp_path / "out").exists()
    assert contents(preparing()) == whole
    assert preparing.reports[0] == kept  # not from the beginning


def test_full_disk_is_told_and_what_was_done_is_kept(preparing, tmp_path):
    whole = contents(preparing("whole", shard_tokens=3000))
    said = r"^cannot write .*out\.incomplete: File too large$"
    with files_of_at_most(3000), pytest.raises(UserError, match=said) as raised:
        preparing(shard_tokens=3000, save_every_s=0)
    out = preparing(shard_tokens=3000)
    assert preparing.reports[0] > 0
    del raised  # with the files it left open, whose last bytes must not come after all
    gc.collect()
    assert contents(out) == whole


def test_bad_document_is_named_by_its_line_and_can_be_mended(source, preparing, tmp_path):
    whole, good = contents(preparing("whole")), source.read_bytes()
    source.write_bytes(good.replace(good.splitlines()[99], b"{"))
    with pytest.raises(UserError, match=r"x\.jsonl line 100 is not JSON"):
        preparing()
    assert [path.name for path in tmp_path.glob("out*")] == ["out.incomplete"]
    source.write_bytes(good)
    assert contents(preparing()) == whole


# --- other requests, other processes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokenizer": "chars"}, "tokenizer"),
        ({"val_fraction": 0.4, "shard_tokens": 900}, "val_fraction, shard_tokens"),
        ({"separator": "--"}, "separator"),
        ("another", "files, name, given"),
        ("touched", "files"),
    ],
)
def test_other_request_for_what_was_begun_is_refused(
    interrupted, preparing, source, tmp_path, changed, said
):
    interrupted(5)
    before = contents(tmp_path / "out.incomplete")
    if changed == "another":
        changed = {"given": write_documents(tmp_path / "other.jsonl", DOCUMENTS[:9])}
    elif changed == "touched":
        os.utime(source, (1, 1))
        changed = {}
    complaint = rf"^.*out\.incomplete holds another preparation \(different: {said}\): pass the old"
    with pytest.raises(UserError, match=complaint):
        preparing(**changed)
    assert contents(tmp_path / "out.incomplete") == before


def test_what_failed_in_its_first_step_does_not_block_its_correction(
    interrupted, preparing, tmp_path
):
    given = write_documents(tmp_path / "y.jsonl", DOCUMENTS, field="content")
    with pytest.raises(UserError, match=r"line 1 has no field 'text': .* --field .*id, content"):
        preparing(given=given)
    interrupted(0, given=given, field="content", tokenizer="chars")  # that has been trained
    options = {"given": given, "field": "content", "tokenizer": "bytes"}
    assert contents(preparing(**options)) == contents(preparing("whole", **options))


def test_what_was_all_but_done_is_neither_lost_nor_given_to_another(preparing, monkeypatch):
    def die(*paths):
        if paths[-1].name == "out":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_each(patch, os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            preparing()
    with pytest.raises(UserError, match=r"holds another preparation \(different: tokenizer\)"):
        preparing(tokenizer="chars")
    done = contents(preparing())
    assert preparing.reports == []
    assert done == contents(preparing("whole"))


def test_second_process_for_the_same_place_is_refused_at_once(preparing, tmp_path):
    refused = []

    def report(tokens, _):
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
        with pytest.raises(UserError, match=r"holds another preparation \(different: tokenizer\)"):
            preparing(taken, tokenizer="chars")
    assert contents(tmp_path) == before


def test_the_same_request_for_a_complete_directory_does_nothing(preparing, tmp_path, caplog):
    out = preparing()
    before = contents(tmp_path)
    assert preparing() == out
    assert preparing.reports == []
    assert "out is complete already: nothing is left to do" in caplog.text
    assert contents(tmp_path) == before
    (out / PROGRESS).write_text("{")
    with pytest.raises(UserError, match=r"out holds another preparation"):
        preparing()


def test_complete_directory_of_an_earlier_version_is_left_alone(preparing):
    out = preparing()
    saved = json.loads((out / PROGRESS).read_text())
    del saved["progress"]["batches"]
    saved["progress"]["place"] = {"file": 1, "row": 0, "done": 0, "length": 0}
    (out / PROGRESS).write_text(json.dumps(saved))
    before = contents(out)
    assert contents(preparing()) == before
    assert preparing.reports == []
    incomplete = out.rename(out.with_name("out.incomplete"))
    (incomplete / "manifest.json").unlink()
    assert contents(preparing()) == before  # such an unfinished one is begun again
    assert preparing.reports[0] == 0


@pytest.mark.parametrize("left", [5000, 0])
def test_shard_that_lost_bytes_is_named(interrupted, preparing, tmp_path, left):
    interrupted(20, shard_tokens=10_000)
    shard = tmp_path / "out.incomplete" / "train_000000.bin"
    os.truncate(shard, min(left, shard.stat().st_size - 1))
    with pytest.raises(UserError, match=r"train_000000\.bin has lost tokens: remove .*out"):
        preparing(shard_tokens=10_000)


def test_link_to_a_folder_is_written_through(preparing, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert preparing() == tmp_path / "elsewhere"
    assert contents(tmp_path / "out") == contents(preparing("whole"))
    assert (tmp_path / "out").is_symlink()
