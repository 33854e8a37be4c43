import json
import re
import signal
import subprocess
import sys
from unittest import mock

import pytest
import requests

from fastgpt import prepare
from fastgpt.data import writing
from fastgpt.data.preparation import open_corpus
from tests.data.sets import contents, split_ids, texts, write_documents
from tests.processes import ROOT, python
from tests.runs import one_line_error

TEXT = "One two three, four five six.\n" * 20


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def main(tmp_path):
    """Runs the command for an output in `tmp_path`; returns that output."""

    def run(source, *flags, out="out"):
        prepare.main([str(source), "--out", str(tmp_path / out), *flags])
        return tmp_path / out

    return run


def test_prints_what_it_wrote(text_file, main, capsys):
    out = main(text_file, "--val-fraction", "0.5")
    corpus = open_corpus(str(out), tokenizer="auto", val_fraction=0.1)
    assert (len(corpus.train), len(corpus.val)) == (300, 300)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "text: 300 training + 300 validation tokens (bytes tokenizer, vocabulary 256)"
    assert rest == [f"sha256 {corpus.sha256}", f"wrote {out}"]


def test_every_flag_reaches_the_preparation(tmp_path, main):
    documents = [f"document {i}" for i in range(1500)]
    source = write_documents(tmp_path / "x.jsonl", documents, field="body")
    out = main(source, "--field", "body", "--val-fraction", "0.25", "--shard-tokens", "900",
               "--tokenizer", "chars", "--workers", "3")  # fmt: skip
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["tokenizer"], manifest["val_fraction"]) == ("chars", 0.25)
    assert manifest["splits"]["train"]["shards"][0]["tokens"] == 900
    assert manifest["splits"]["val"]["documents"] == pytest.approx(375, abs=60)
    out = main(source, "--field", "body", "--tokenizer", "bpe", "--vocab-size", "270", out="bpe")
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["vocab_size"], manifest["val_fraction"]) == (270, 0.005)


@pytest.mark.parametrize(
    ("flag", "separator"),
    [(r"\n", "\n"), ("<|endoftext|>", "<|endoftext|>"), (r"\t§\x41", "\t§A"), ("— 東", "— 東")],
)
def test_separator_is_taken_as_a_shell_hands_it_over(tmp_path, main, flag, separator):
    source = tmp_path / "x.txt"
    source.write_text(separator.join(f"document {i}" for i in range(50)), encoding="utf-8")
    out = main(source, "--separator", flag, "--tokenizer", "bytes", "--val-fraction", "0.3")
    found = b"".join(bytes(split_ids(out, split).astype("u1")) for split in ("train", "val"))
    assert sorted(found.decode().splitlines()) == sorted(f"document {i}" for i in range(50))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", r"x\.jsonl line 2: expected a JSON object with text in the field 'text', .*1"),
        (r"--separator \xzz", r"--separator .*: expected text, with \\n"),
        ("--tokenizer words", "unknown tokenizer 'words'"),
        ("--vocab-size 5", "--vocab-size is 5: the bytes tokenizer has its own vocabulary"),
        ("--workers 0", "--workers is 0: expected 1 or more"),
        ("--shard-tokens 0", "--shard-tokens is 0: expected 1 to 2,147,483,647"),
        ("--val-fraction 0", r"--val-fraction is 0.0: expected a fraction in \(0, 1\)"),
        ("--val-fraction 1", r"--val-fraction is 1.0: expected a fraction in \(0, 1\)"),
        ("--val-fraction nan", r"--val-fraction is nan: expected a fraction in \(0, 1\)"),
    ],
)
def test_what_can_be_mended_is_told_in_one_line(tmp_path, main, capsys, flags, said):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    argv = (tmp_path / "x.jsonl", "--tokenizer", "bytes", *flags.split())
    assert re.search(said, one_line_error(capsys, main, *argv))


def test_ctrl_c_ends_quietly_and_the_same_command_begins_again(tmp_path, main, monkeypatch):
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 10_000)
    documents = [f"document {i} " + "and so on " * 40 for i in range(3000)]
    source = write_documents(tmp_path / "x.jsonl", documents)
    flags = ["--tokenizer", "bytes", "--val-fraction", "0.3", "--workers", "1"]
    slow = (
        "import sys, time; from fastgpt import prepare\n"
        "from fastgpt.data import writing\n"
        "encode = writing.encode\n"
        "def slow(*args, **options):\n"
        "    print('at work', flush=True); time.sleep(0.05); return encode(*args, **options)\n"
        "writing.BATCH_CHARACTERS = 10_000; writing.encode = slow; prepare.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", slow, source, "--out", tmp_path / "out", *flags]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(8):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted"
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
    assert contents(main(source, *flags)) == contents(main(source, *flags, out="unbroken"))


def test_without_gpt2s_files_and_network_it_says_what_to_put_where(
    tmp_path, main, capsys, monkeypatch
):
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "mine"))

    offline = mock.Mock(side_effect=requests.ConnectionError("no route to host"))
    monkeypatch.setattr(requests, "get", offline)
    error = one_line_error(capsys, main, write_documents(tmp_path / "x.jsonl", texts(1500)))
    assert re.search("put .*vocab.bpe.* into .*mine.*: cannot download .*no route to host", error)
    assert not (tmp_path / "out").exists()


MEMORY = """
import re, sys
from pathlib import Path
from fastgpt.data.preparation import prepare
for size in ("small", "large"):
    folder = Path(sys.argv[1], size)
    [path] = folder.glob("x.*")
    prepare(str(path), folder / "out", tokenizer=sys.argv[2], workers=2)
    # not ru_maxrss, which starts at the peak of the process that started this one
    print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "tokenizer"), [("x.txt", "chars"), ("x.jsonl.gz", "bytes"), ("x.parquet", "bytes")]
)
def test_memory_does_not_grow_with_the_source(tmp_path, name, tokenizer):
    for size, megabytes in (("small", 8), ("large", 56)):
        (tmp_path / size).mkdir()
        lines = [f"{i} {'some words and numbers; ' * 40}" for i in range(megabytes * 2**10)]
        write_documents(tmp_path / size / name, lines, separator="\n")
    done = python("-c", MEMORY, tmp_path, tokenizer)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 24 * 1024  # KiB, for 48 MiB more; read whole, 48 MiB at the least
