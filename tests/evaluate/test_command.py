"""`python -m fastgpt.evaluate`, and tasks during training."""

import json
import math
import re
import sys

import numpy as np
import pytest
import torch

from fastgpt.convert.source import load
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError, run_command
from fastgpt.evaluate import __main__ as command
from fastgpt.logs.metrics import read_records
from tests.convert.models import saved_run
from tests.data.sets import prepared, texts
from tests.evaluate.conftest import write
from tests.runs import finish, one_line_error, torchrun_in_turn


def results(run, *flags):
    """Runs the command, and reads the file that it wrote, in which no number may be infinite."""
    out = run.with_name("out.json")
    command.main([str(run), "--json", str(out), "--device", "cpu", *flags])
    return json.loads(out.read_text(), parse_constant=pytest.fail)


def test_table_and_json_say_the_same(folders, file, capsys):
    found = []
    for folder, batch in zip(folders, ("3", "16")):
        rows = results(folder, "--tasks", f"hellaswag={file}", "--batch", batch)
        found.append({(row["task"], row["metric"]): row["value"] for row in rows})
        cut, *said = capsys.readouterr().out.splitlines()
        assert re.match(r"hellaswag: \d+ longer than the context, cut from the left", cut)
        expected = [[*name, f"{value:.4f}", "52"] for name, value in found[-1].items()]
        assert [line.split() for line in said[-2:]] == expected
        assert rows[0]["examples"] == 52
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_bits_per_byte_of_a_text_and_of_held_out_tokens(tmp_path):
    run = saved_run(tmp_path / "run", ByteTokenizer(), vocab_size=256)
    (tmp_path / "a.txt").write_text(text := "the naïve cat sat on the mat. " * 9)
    loss, _, bits = results(run, "--text", str(tmp_path / "a.txt"))
    ids, total = torch.tensor([*text.encode()]), 0.0
    for start in range(0, len(ids) - 1, 40):
        first = min(start, len(ids) - 41)
        window = ids[first : first + 41]
        log_p = load(run)[0](window[None, :-1])[0].log_softmax(-1)
        total -= log_p[torch.arange(40), window[1:]][start - first :].sum().item()
    assert loss["value"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert bits["value"] == pytest.approx(loss["value"] / math.log(2))  # a byte is a token
    assert loss["examples"] == len(ids) - 1
    data = prepared(tmp_path / "data", texts(40))
    with pytest.raises(UserError, match=r"prepared with another bpe .* than the model's \(bytes\)"):
        results(run, "--text", str(data))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"a\.txt has 1 token: expected at least 2"):
        results(run, "--text", str(tmp_path / "a.txt"))


def test_an_infinite_perplexity_is_null_in_json(folders, file, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_task", lambda *_: {"perplexity": math.inf})
    assert [row["value"] for row in results(folders[0], "--tasks", f"hellaswag={file}")] == [None]
    assert re.search(r"hellaswag +perplexity +inf +52\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "nothing to evaluate: expected --tasks or --text"),
        ("--tasks hellaswag=x,hellaswag=y", "expected different names, such as hellaswag=PATH"),
        ("--tasks =x", "--tasks is '=x': expected different names"),
        ("--tasks hellaswg=x", "unknown task with a file 'hellaswg'; did you mean 'hellaswag'?"),
        ("--tasks hellaswag=x.jsonl", "hellaswag: x.jsonl cannot be read: No such file"),
        ("--text x.txt", "'x.txt': no such file or folder"),
        ("--tasks arc_easy", "tasks without a file need the package lm-eval: install the"),
        ("--tasks hellaswag=x --include tests", "--include is tests: expected a folder, for tasks"),
        ("--tasks arc_easy --include nowhere", "--include is nowhere: expected a folder"),
        ("--batch 0 --text x", "--batch is 0: expected a number greater than 0"),
    ],
)
def test_bad_flags_are_one_line(folders, flags, said, capsys, monkeypatch):
    argv = ["evaluate", str(folders[0]), *flags.split(), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert said in one_line_error(capsys, run_command, command.main)


def test_a_model_without_tokenizer_is_refused(tmp_path):
    run = saved_run(tmp_path / "run")
    with pytest.raises(UserError, match=f"^{run}/.* has no tokenizer: expected tokenizer.json"):
        results(run, "--text", "x")


# --- during training ------------------------------------------------------------------------------


def scores(run):
    names = ("hellaswag_acc", "hellaswag_acc_norm")
    return [[r[n] for n in names] for r in read_records(run / "metrics.jsonl") if "val_loss" in r]


def test_tasks_are_scored_with_each_evaluation_on_any_number_of_ranks(
    fit, tiny, file, tmp_path, capsys
):
    # odd numbers of short questions: with bytes the context holds 16
    row = {"ctx": "the", "endings": ["cat", "dog", "mat, and", "log"]}
    write(file, *(row | {"label": label} for label in (0, 1, 2, 3, 2)))
    few = f"--train.eval-tasks {f'hellaswag={file}'} --data.eval-tokens 64 --train.sample-tokens 0"
    few += " --optim.kind adamw"
    kinds = ("ddp", "fsdp --train.micro-batch 1", "fsdp --parallel.tp 2")
    runs = [
        tiny(few, f"--parallel.kind {kind} --run-dir {tmp_path / str(i)}")
        for i, kind in enumerate(kinds)
    ]
    process = torchrun_in_turn(2, tmp_path / "jobs", runs)
    one = fit(few)
    said = re.findall(r"^step +(\d) +hellaswag_acc \d\.\d{4}  .*$", capsys.readouterr().out, re.M)
    assert said == ["0", "4", "8"]
    finish(process)
    assert np.array(scores(one)).shape == (3, 2)
    for i in range(len(kinds)):
        np.testing.assert_allclose(scores(tmp_path / str(i)), scores(one), rtol=1e-4)
    values = [row["value"] for row in results(one, "--tasks", f"hellaswag={file}")]
    assert values == pytest.approx(scores(one)[-1], rel=1e-5)


def test_a_bad_task_is_refused_before_training(fit, tmp_path):
    with pytest.raises(UserError, match=r"^--train.eval-tasks: hellaswag: no.jsonl cannot be read"):
        fit("--train.eval-tasks hellaswag=no.jsonl")
    assert not (tmp_path / "run").exists()
