"""`python -m fastgpt.evaluate`."""

import json
import math
import re
import sys

import pytest
import torch

from fastgpt.convert.source import load
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError, run_command
from fastgpt.evaluate import __main__ as command
from tests.convert.models import saved_run
from tests.data.sets import prepared, texts
from tests.runs import one_line_error


def results(run, *flags):
    """Runs the command, and reads the file that it wrote, in which no number may be infinite."""
    out = run.with_name("out.json")
    command.main([str(run), "--json", str(out), "--device", "cpu", *flags])
    return json.loads(out.read_text(), parse_constant=pytest.fail)


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


def test_a_cpu_is_set_up_as_for_training_and_progress_is_shown(folders, tmp_path, monkeypatch):
    begun, shown = [], []
    monkeypatch.setattr("fastgpt.device.cpu._start_watching", begun.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("rich.status.Status.update", lambda _, text: shown.append(text))
    (text := tmp_path / "a.txt").write_text("the cat sat on the mat " * 40)
    results(folders[0], "--text", str(text), "--batch", "1")
    assert len(begun) == 1
    assert shown[0] == f"evaluating 1/{len(shown)}"


def test_an_infinite_perplexity_is_null_in_json(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        command, "score_text", lambda *_, **__: ({"perplexity": math.inf, "x": 0.5}, 52)
    )
    (text := tmp_path / "a.txt").write_text("the cat sat on the mat")
    assert [row["value"] for row in results(folders[0], "--text", str(text))] == [None, 0.5]
    out = capsys.readouterr().out
    assert re.search(r"a.txt +perplexity +inf +52\n.*a.txt +x +0\.5000 +52\n", out)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "nothing to evaluate: expected --tasks or --text"),
        ("--text x.txt", "'x.txt': no such file or folder"),
        ("--tasks arc_easy", "--tasks needs the package lm-eval: make setup EXTRAS"),
        ("--text x --include tests", "--include is tests: expected a folder, with --tasks"),
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
