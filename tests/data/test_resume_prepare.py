import gc
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastgpt.data import batches, reading, request, shard_writer, writing
from fastgpt.data.preparation import prepare
from fastgpt.data.request import PROGRESS
from fastgpt.errors import UserError
from tests.data.sets import contents, write_documents
from tests.processes import python
from tests.runs import before_each, files_of_at_most, raised_at_line

DOCUMENTS = [f"Document {i}: naïve {'and so on ' * (i % 9)}" for i in range(150)]
NEVER = 1e9


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
            preparing(stop_after=after + 1, save_every_s=NEVER, **options)
        return preparing.reports[-1]

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


def test_ctrl_c_keeps_what_was_done(interrupted, preparing, tmp_path):
    whole = contents(preparing("whole"))
    kept = interrupted(20)
    assert not (tmp_path / "out").exists()
    progress = json.loads((tmp_path / "out.incomplete" / PROGRESS).read_text())["progress"]
    assert sum(progress["tokens"].values()) == kept > 1000
    assert contents(preparing()) == whole
    assert preparing.reports[0] == kept  # not from the beginning


def test_ctrl_c_at_any_line_keeps_a_state_to_go_on_from(preparing, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of them, and no power cut to fear
    given = write_documents(tmp_path / "few.jsonl", DOCUMENTS[:20])
    whole = contents(preparing("whole", given))

    def stop_at(line):
        try:
            with raised_at_line(
                line, KeyboardInterrupt, writing.__file__, shard_writer.__file__, request.__file__
            ):
                preparing("out", given, save_every_s=NEVER)
        except KeyboardInterrupt:
            return True
        return False

    def stopped_at(line):
        # In a thread of its own: CPython may leave the exception of a trace function behind as
        # "being handled", and later ones in this thread would have it as their context.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(stop_at, line).result()

    line, saved = 1, 0
    while stopped_at(line):
        saved += (tmp_path / "out.incomplete" / PROGRESS).exists()
        if not (tmp_path / "out").exists():
            preparing("out", given)
        assert contents(tmp_path / "out") == whole, line
        shutil.rmtree(tmp_path / "out")
        line += 2
    assert saved > 50


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


def test_bad_document_names_its_line_and_goes_on_once_it_is_mended(
    source, preparing, tmp_path, caplog
):
    whole = contents(preparing("whole"))
    good = source.read_bytes()
    line, time = good.splitlines()[99], source.stat().st_mtime_ns
    source.write_bytes(good.replace(line, b"{".ljust(len(line))))
    os.utime(source, ns=(time, time))
    with pytest.raises(UserError, match=r"x\.jsonl line 100 is not JSON"):
        preparing()
    assert [path.name for path in tmp_path.glob("out*")] == ["out.incomplete"]
    source.write_bytes(good)
    assert contents(preparing()) == whole
    assert preparing.reports[0] > 0
    assert f"{source} was changed: reading on from row" in caplog.text


def test_file_that_was_read_may_not_change(preparing, tmp_path):
    (tmp_path / "set").mkdir()
    files = [write_documents(tmp_path / "set" / f"{n}.jsonl", DOCUMENTS[:60]) for n in range(3)]
    bad, good = files[2].read_bytes() + b"{\n", files[2].read_bytes()
    files[2].write_bytes(bad)
    with pytest.raises(UserError, match=r"2\.jsonl line 61 is not JSON"):
        preparing(given=tmp_path / "set")
    files[0].write_bytes(good + good)
    with pytest.raises(UserError, match=r"another preparation \(.*0\.jsonl was changed\)"):
        preparing(given=tmp_path / "set")


# --- other requests, other processes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokenizer": "chars"}, "--tokenizer was 'bytes', now 'chars'"),
        ({"val_fraction": 0.4}, "--val-fraction was 0.3, now 0.4"),
        ({"shard_tokens": 900}, "--shard-tokens was 800"),
        ({"separator": "--"}, "--separator was None, now '--'"),
        ("another", "source was .*, it had other files"),
    ],
)
def test_other_request_for_what_was_begun_is_refused(
    interrupted, preparing, tmp_path, changed, said
):
    interrupted(5)
    before = contents(tmp_path / "out.incomplete")
    if changed == "another":
        changed = {"given": write_documents(tmp_path / "other.jsonl", DOCUMENTS[:9])}
    complaint = rf"^.*out\.incomplete holds another preparation \({said}.*$"
    with pytest.raises(UserError, match=complaint):
        preparing(**changed)
    assert contents(tmp_path / "out.incomplete") == before
    assert contents(preparing()) == contents(preparing("whole"))


def test_what_failed_in_its_first_step_does_not_block_its_correction(
    interrupted, preparing, tmp_path
):
    given = write_documents(tmp_path / "y.jsonl", DOCUMENTS, field="content")
    with pytest.raises(UserError, match=r"line 1 has no field 'text': .* --field .*id, content"):
        preparing(given=given)
    interrupted(0, given=given, field="content", tokenizer="chars")  # that has been trained
    options = {"given": given, "field": "content", "tokenizer": "bytes"}
    assert contents(preparing(**options)) == contents(preparing("whole", **options))


def test_other_request_for_what_was_all_but_done_never_gets_its_data(preparing, monkeypatch):
    def die(*paths):
        if paths[-1].name == "out":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_each(patch, os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            preparing()
    with pytest.raises(UserError, match=r"holds another preparation .--tokenizer was 'bytes'"):
        preparing(tokenizer="chars")
    # what was done is neither lost nor done again
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
        with pytest.raises(UserError, match=r"holds another preparation .--tokenizer was 'bytes'"):
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
    with pytest.raises(
        UserError, match=r"out/progress\.json is damaged: remove .*out to start again"
    ):
        preparing()


@pytest.mark.parametrize("left", [5000, 0])
def test_shard_that_lost_bytes_is_named(interrupted, preparing, tmp_path, left):
    interrupted(20, shard_tokens=10_000)
    shard = tmp_path / "out.incomplete" / "train_000000.bin"
    os.truncate(shard, min(left, shard.stat().st_size - 1))
    with pytest.raises(UserError, match=r"train_000000\.bin has [\d,]+ bytes, not the .* remove"):
        preparing(shard_tokens=10_000)


def test_link_to_a_folder_is_written_through(preparing, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert preparing() == tmp_path / "elsewhere"
    assert contents(tmp_path / "out") == contents(preparing("whole"))
    assert (tmp_path / "out").is_symlink()
