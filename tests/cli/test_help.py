"""The help of each command: its flags with type and default, plain and at most 80 columns wide."""

import re
import sys

import pytest
import torch

import fastgpt
from fastgpt import cli, compare, prepare, sample
from fastgpt.cli import answer
from fastgpt.config.config import COMMON
from fastgpt.config.recipes import RECIPES
from fastgpt.convert import __main__ as convert
from fastgpt.data import __main__ as data
from fastgpt.doctor import __main__ as doctor
from fastgpt.evaluate import __main__ as evaluate
from fastgpt.report import __main__ as report
from fastgpt.serve import __main__ as serve

COMMANDS = {
    "python train.py": (lambda argv: sys.exit(cli.main(argv)), "--data.source: text"),
    "python -m fastgpt.sample": (sample.main, "--prompt: "),
    "python -m fastgpt.prepare": (prepare.main, "--out: a path"),
    "python -m fastgpt.data": (data.main, "--tokenizer: text"),
    "python -m fastgpt.evaluate": (evaluate.main, "--tasks: "),
    "python -m fastgpt.compare": (compare.main, "--json, --no-json"),
    "python -m fastgpt.doctor": (doctor.main, "--gpus "),
    "python -m fastgpt.convert": (convert.main, "--dtype: "),
    "python -m fastgpt.report": (report.main, "--out, -o: "),
    "python -m fastgpt.serve": (serve.main, "--slots: an integer"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main, flag = COMMANDS[command]
    texts = []
    for argv in ("-h", "--help"):
        with pytest.raises(SystemExit) as stopped:
            main([argv])
        assert not stopped.value.code
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"usage: {command} ")
    assert flag in texts[0]
    assert "\x1b" not in texts[0]
    assert max(map(len, texts[0].splitlines())) <= 80


def test_help_is_of_the_recipe_that_is_named_on_either_side(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = answer(["--help", "lecture-head"])
    assert said == answer(["lecture-head", "--help"]) != answer(["--help"])
    assert "--model.num-layers: an integer (default: 1)\n" in said


def test_common_flags_come_with_help_and_the_others_with_help_all():
    said, rest = answer(["pubmed", "--help"]), answer(["pubmed", "--help-all"])
    assert len(re.findall(r"^  --", said, re.M)) == len(COMMON)
    assert {*re.findall(r"^  --\S+", said, re.M)} < {*re.findall(r"^  --\S+", rest, re.M)}
    words = " ".join(rest.split())
    assert "--model.context: an integer (default: 512) Longest sequence, in tokens." in words
    assert "--optim.kind: adamw or muon (default: adamw)" in words
    assert "--model.tied, --model.no-tied (default: False)" in words
    assert "--recipe" not in words


def test_recipes_and_the_version_are_told():
    lines = answer(["--list-recipes"]).splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert answer(["baby", "--version"]) == f"fastgpt {fastgpt.__version__}"
