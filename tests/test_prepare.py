import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastgpt import prepare
from fastgpt.corpus import open_corpus
from fastgpt.tokenizer import GPT2_SHA256

TEXT = "One two three, four five six.\n" * 20


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_prints_what_it_wrote(text_file, tmp_path, capsys):
    prepare.main([str(text_file), "--out", str(tmp_path / "out"), "--val-fraction", "0.5"])
    corpus = open_corpus(str(tmp_path / "out"), tokenizer="auto", val_fraction=0.1)
    assert (corpus.train.size, corpus.val.size) == (300, 300)
    assert capsys.readouterr().out.splitlines() == [
        "text: 300 tokens to train on, 300 to validate on (bytes, vocabulary 256)",
        f"sha256 {corpus.sha256}",
        f"wrote {tmp_path / 'out'}",
    ]


def test_runs_as_a_module_and_shows_errors_in_one_line(text_file, tmp_path):
    command = [sys.executable, "-m", "fastgpt.prepare", str(text_file), "--out", str(tmp_path)]
    root = Path(prepare.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {tmp_path} is not an empty directory; give another one or remove it\n"
    )


@pytest.mark.parametrize("argv", [[], ["x.txt"], ["x.txt", "--out", "o", "--tokenizer", "words"]])
def test_wrong_command_line_exits_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        prepare.main(argv)
    assert stopped.value.code == 2


def test_gpt2_works_offline_from_its_two_files(text_file, tmp_path, capsys):
    folder = Path(os.environ.get("FASTGPT_DATA", "data"))
    if missing := [name for name in GPT2_SHA256 if not (folder / name).is_file()]:
        pytest.skip(f"FASTGPT_DATA has no {' and no '.join(missing)}")
    prepare.main([str(text_file), "--out", str(tmp_path / "out"), "--tokenizer", "gpt2"])
    assert "(gpt2, vocabulary 50,257)" in capsys.readouterr().out
    corpus = open_corpus(str(tmp_path / "out"), tokenizer="gpt2", val_fraction=0.1)
    decode = corpus.tokenizer.decode
    assert decode(corpus.train) + decode(corpus.val) == TEXT
    assert corpus.train.max() > 255
    assert corpus.val_bytes_per_token == pytest.approx(60 / corpus.val.size)
