"""`python -m fastgpt.evaluate`, and tasks during training."""

import json
import math
import re
import sys

import numpy as np
import pytest
import torch

from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import run_command, shown_in_one_line
from fastgpt.evaluate import __main__ as command
from fastgpt.metrics import read_records
from tests.convert.models import saved_run
from tests.data.sets import prepared, texts
from tests.processes import ROOT
from tests.trainer.runs import finish, one_line_error, torchrun

FLAGS = ("--device", "cpu")


def asked(files) -> str:
    return ",".join(f"{name}={path}" for name, path in files.items())


def test_table_and_json_say_the_same(folders, files, tmp_path, capsys):
    found = []
    for folder, batch in zip(folders, ("3", "16")):
        out = tmp_path / "out.json"
        flags = ("--tasks", asked(files), "--json", str(out), "--batch", batch, *FLAGS)
        command.main([str(folder), *flags])
        rows = json.loads(out.read_text())
        expected = [(row["task"], row["metric"], f"{row['value']:.4f}") for row in rows]
        found.append({(row["task"], row["metric"]): row["value"] for row in rows})
        cut, *said = capsys.readouterr().out.splitlines()
        assert re.match(r"hellaswag: \d+ longer than the context, cut from the left", cut)
        assert [tuple(line.split()[:3]) for line in said[-4:]] == expected
        assert rows[0]["examples"] == 52
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_bits_per_byte_of_a_text_and_of_held_out_tokens(tmp_path, capsys):
    run = saved_run(tmp_path / "run", ByteTokenizer(), vocab_size=256)
    text = "the naïve cat sat on the mat. " * 9
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "out.json"
    command.main([str(run), "--text", str(tmp_path / "a.txt"), "--json", str(out), *FLAGS])
    loss, _, bits = json.loads(out.read_text())
    model, _ = command.load(str(run))
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    total = 0.0
    for start in range(0, len(ids) - 1, 40):
        first = max(0, min(start, len(ids) - 41))
        window = torch.from_numpy(ids[first : first + 41])
        log_p = model(window[None, :-1])[0].log_softmax(-1)
        chosen = log_p[torch.arange(40), window[1:]]
        total -= chosen[start - first :].sum().item()
    assert loss["value"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert bits["value"] == pytest.approx(loss["value"] / math.log(2))  # a byte is a token
    assert loss["examples"] == len(ids) - 1
    data = prepared(tmp_path / "data", texts(40))
    capsys.readouterr()
    said = one_line_error(
        capsys, shown_in_one_line()(command.main), [str(run), "--text", str(data), *FLAGS]
    )
    assert "was prepared with another bpe tokenizer than the model's (bytes)" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "nothing to evaluate: expected --tasks or --text"),
        (("--tasks", "lambada=x,lambada=y"), "expected different names, such as hellaswag=PATH"),
        (("--tasks", "=x"), "--tasks is '=x': expected different names"),
        (("--tasks", "lambda=x"), "unknown task 'lambda'; did you mean 'lambada'?"),
        (("--tasks", "lambada=x.jsonl"), "lambada: x.jsonl cannot be read: No such file"),
        (("--text", "x.txt"), "'x.txt': no such file or folder"),
        (("--tasks", "arc_easy"), "tasks without a file need the package lm-eval: install the"),
        (("--batch", "0", "--text", "x"), "--batch is 0: expected a number greater than 0"),
    ],
)
def test_bad_flags_are_one_line(folders, flags, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["evaluate", str(folders[0]), *flags, *FLAGS])
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    assert said in one_line_error(capsys, run_command, command.main)


def test_a_model_without_tokenizer_is_refused(tmp_path, capsys):
    run = saved_run(tmp_path / "run")
    said = one_line_error(
        capsys, shown_in_one_line()(command.main), [str(run), "--text", "x", *FLAGS]
    )
    assert f"{run} has no tokenizer: expected tokenizer.json beside the model" in said


# --- during training ------------------------------------------------------------------------------


def scores(run):
    names = ("hellaswag_acc", "hellaswag_acc_norm", "lambada_acc", "lambada_perplexity")
    return [[r[n] for n in names] for r in read_records(run / "metrics.jsonl") if "val_loss" in r]


@pytest.fixture
def few(files):
    """The first questions alone, an odd number of them; with bytes the context holds 16."""
    (files["lambada"]).write_text('{"text": "the cat sat"}\n{"text": "the dog"}\n{"text": "a mat"}')
    row = {"ctx": "the", "endings": ["cat", "dog", "mat, and", "log"], "label": 2}
    lines = [json.dumps(row | {"label": label}) for label in (0, 1, 2, 3, 2)]
    files["hellaswag"].write_text("\n".join(lines))
    return f"--train.eval-tasks {asked(files)} --data.eval-tokens 64 --train.sample-tokens 0"


def test_tasks_are_scored_with_each_evaluation_on_any_number_of_ranks(
    fit, tiny, few, tmp_path, capsys
):
    process = torchrun(2, str(ROOT / "train.py"), *tiny(few, f"--run-dir {tmp_path / 'two'}"))
    one = fit(few)
    said = re.findall(r"^step +(\d) +hellaswag_acc \d\.\d{4}  .*$", capsys.readouterr().out, re.M)
    assert said == ["0", "4", "8"]
    finish(process)
    assert np.array(scores(one)).shape == (3, 4)
    np.testing.assert_allclose(scores(tmp_path / "two"), scores(one), rtol=1e-4)
    command.main([str(one), "--tasks", few.split()[1], "--json", str(tmp_path / "x"), *FLAGS])
    rows = json.loads((tmp_path / "x").read_text())
    assert [row["value"] for row in rows] == pytest.approx(scores(one)[-1], rel=1e-5)


def test_a_bad_task_is_refused_before_training(fit, tmp_path, capfd):
    said = one_line_error(capfd, shown_in_one_line()(fit), "--train.eval-tasks lambada=no.jsonl")
    assert said.startswith("error: --train.eval-tasks: lambada: no.jsonl cannot be read: No such")
    assert not (tmp_path / "run").exists()
