"""The command that prepares text, and preparations that are killed, interrupted or refused."""

import gc
import json
import signal
import sys
from unittest import mock

import pytest

from fastgpt import prepare as command
from fastgpt.data import download, preparation, reading, writing
from fastgpt.data.preparation import prepare
from fastgpt.errors import UserError
from tests.data.sets import contents, split_ids, write_documents
from tests.processes import python
from tests.runs import before_each, files_of_at_most, one_line_error

DOCUMENTS = [f"Document {i}: naïve {'and so on ' * (i % 9)}" for i in range(150)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shrinks the batches of the tokenizer, so that even a short text has many."""
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100)


@pytest.fixture
def source(tmp_path):
    return write_documents(tmp_path / "x.jsonl", DOCUMENTS)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def main(tmp_path):
    """Runs the command for an output in `tmp_path`; returns that output."""

    def run(source, *flags, out="out"):
        command.main([str(source), "--out", str(tmp_path / out), *flags])
        return tmp_path / out

    return run


def test_every_flag_reaches_the_preparation_and_the_result_is_printed(tmp_path, main, capsys):
    documents = [f"document {i}" for i in range(700)]
    source = write_documents(tmp_path / "y.jsonl", documents, field="body")
    out = main(source, "--field", "body", "--val-fraction", "0.25", "--shard-tokens", "900",
               "--tokenizer", "chars", "--workers", "3")  # fmt: skip
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["tokenizer"], manifest["val_fraction"]) == ("chars", 0.25)
    train, val = manifest["splits"].values()
    assert train["shards"][0]["tokens"] == 900
    assert val["documents"] == pytest.approx(175, abs=40)
    first, *rest = capsys.readouterr().out.splitlines()
    counts = f"{train['tokens']:,} training + {val['tokens']:,} validation tokens"
    assert first == f"y: {counts} (chars tokenizer, vocabulary 20)"
    assert rest == [f"sha256 {manifest['sha256']}", f"wrote {out}"]
    out = main(source, "--field", "body", "--tokenizer", "bpe", "--vocab-size", "270", out="bpe")
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["vocab_size"], manifest["val_fraction"]) == (270, 0.005)


@pytest.mark.parametrize(
    ("flag", "separator"), [(r"\n", "\n"), (r"\t§\x41", "\t§A"), ("— 東", "— 東")]
)
def test_separator_is_taken_as_a_shell_hands_it_over(tmp_path, main, flag, separator):
    (tmp_path / "x.txt").write_text(separator.join(DOCUMENTS), encoding="utf-8")
    out = main(tmp_path / "x.txt", "--separator", flag, "--tokenizer", "bytes",
               "--val-fraction", "0.3")  # fmt: skip
    found = b"".join(bytes(split_ids(out, split).astype("u1")) for split in ("train", "val"))
    assert sorted(found.decode().splitlines()) == sorted(DOCUMENTS)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (r"--separator \xzz", "--separator"),
        ("--tokenizer words", "unknown tokenizer 'words'"),
        ("--vocab-size 5", "--vocab-size is 5"),
        ("--workers 0", "--workers is 0: expected 1 or more"),
        ("--shard-tokens 0", "--shard-tokens is 0"),
        *((f"--val-fraction {x}", f"--val-fraction is {x}") for x in ("0.0", "1.0", "nan")),
    ],
)
def test_wrong_flag_is_named_in_one_line(source, main, capsys, flags, word):
    assert word in one_line_error(capsys, main, source, "--tokenizer", "bytes", *flags.split())


def test_ctrl_c_ends_quietly_and_the_same_command_begins_again(
    source, main, tmp_path, monkeypatch, capsys
):
    flags = ["--tokenizer", "bytes", "--val-fraction", "0.3"]
    whole, before = contents(main(source, *flags, out="whole")), sorted(tmp_path.glob("[!.]*"))
    calls = []

    def interrupt(*_, **__):
        calls.append(1)
        if len(calls) == 8:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        before_each(patch, writing, "encode", interrupt)
        with pytest.raises(SystemExit) as stopped:
            main(source, *flags)
    assert stopped.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert sorted(tmp_path.glob("[!.]*")) == before
    assert contents(main(source, *flags)) == whole


def test_gpt2s_files_are_missed_before_a_long_download(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))
    offline = mock.Mock(side_effect=UserError("offline"))
    monkeypatch.setattr(download, "_download", offline)
    monkeypatch.setattr(preparation, "find_source", None)
    for name, tokenizer in (("hf:one/set", "auto"), ("fineweb", "auto"), ("x.jsonl", "gpt2")):
        with pytest.raises(UserError, match="offline"):
            prepare(name, tmp_path / "out", tokenizer=tokenizer)


MEMORY = """
import re, sys
from pathlib import Path
from fastgpt.data.preparation import prepare
for size in ("small", "large"):
    path = Path(sys.argv[1], size)
    prepare(f"{path}.parquet", path, tokenizer="bytes", workers=2)
    # not ru_maxrss, which starts at the peak of the process that started this one
    print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_source(tmp_path):
    for size, megabytes in (("small", 8), ("large", 56)):
        lines = [f"{i} {'some words and numbers; ' * 40}" for i in range(megabytes * 2**10)]
        write_documents(tmp_path / f"{size}.parquet", lines)
    done = python("-c", MEMORY, tmp_path)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 24 * 1024  # KiB, for 48 MiB more; read whole, 48 MiB at the least


# --- interrupted ----------------------------------------------------------------------------------


@pytest.fixture
def preparing(source, tmp_path):
    """Prepares a text with fixed options, which arguments override."""

    def run(out="out", **options):
        fixed = {"tokenizer": "bytes", "val_fraction": 0.3, "shard_tokens": 800, "workers": 2}
        return prepare(str(source), tmp_path / out, **{**fixed, **options})

    return run


def test_killed_wherever_it_changes_the_disk_nothing_looks_whole(tmp_path):
    (tmp_path / "notes").mkdir()
    for name in "abc":  # each without its last newline
        (tmp_path / "notes" / name).write_text(f"file {name}: {'some words naïve and ' * 3}end")
    done = python("-m", "tests.data.killed_prepare", tmp_path / "notes", tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
    assert len(list((tmp_path / "whole").iterdir())) >= 5


def test_full_disk_is_told(preparing):
    whole = contents(preparing("whole", shard_tokens=3000))
    said = r"^cannot write .*out: File too large$"
    with files_of_at_most(3000), pytest.raises(UserError, match=said) as raised:
        preparing(shard_tokens=3000)
    del raised  # with the files it left open, whose last bytes must not come after all
    gc.collect()
    assert contents(preparing(shard_tokens=3000)) == whole


def test_unfinished_shards_have_no_header_and_another_process_is_refused(preparing, tmp_path):
    refused = []

    def report(tokens):
        for path in (tmp_path / "out.incomplete").glob("*.bin"):
            assert path.read_bytes()[:1024] == bytes(1024)
        if len(refused) < 3:
            with pytest.raises(UserError, match=r"another process is preparing .*out: wait"):
                preparing()
            refused.append(tokens)

    out = preparing(report=report)
    assert len(refused) == 3
    assert contents(out) == contents(preparing("whole"))


def test_place_that_is_taken_is_refused_and_kept(preparing, source, tmp_path, caplog, monkeypatch):
    out = preparing()
    (tmp_path / "empty").mkdir()
    preparing("empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    before = contents(tmp_path)
    for taken in ("full", source.name):
        with pytest.raises(UserError, match="is not an empty directory"):
            preparing(taken)
    for taken in ("out", "empty"):
        with pytest.raises(UserError, match="holds another preparation"):
            preparing(taken, tokenizer="chars")
    monkeypatch.setattr(preparation, "write_directory", None)
    assert preparing() == out  # the same request
    assert "out is complete already" in caplog.text
    monkeypatch.setattr("pathlib.Path.is_mount", lambda _: True)
    with pytest.raises(UserError, match="other is a mount point"):
        preparing("other")
    assert contents(tmp_path) == before


def test_link_to_a_folder_is_written_through(preparing, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert preparing() == tmp_path / "elsewhere"
    assert contents(tmp_path / "out") == contents(preparing("whole"))
    assert (tmp_path / "out").is_symlink()
