"""The help of each command: its flags with type and default, plain and at most 80 columns wide."""

import re
import sys

import pytest
import torch

import fastgpt
from fastgpt.cli import answer
from fastgpt.config.config import COMMON
from fastgpt.config.recipes import RECIPES
from tests.cli.conftest import main_of

COMMANDS = {
    "train": "--data.source: text",
    "sample": "--prompt: ",
    "prepare": "--out: a path",
    "data": "--tokenizer: text",
    "evaluate": "--tasks: ",
    "compare": "--json, --no-json",
    "doctor": "--gpus ",
    "convert": "--dtype: ",
    "report": "--out, -o: ",
    "serve": "--slots: an integer",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    texts = []
    for argv in ("-h", "--help"):
        if command == "train":
            main_of("fastgpt.cli")([argv])
        else:
            with pytest.raises(SystemExit) as stopped:
                main_of(f"fastgpt.{command}")([argv])
            assert not stopped.value.code
        texts.append(capsys.readouterr().out)
    typed = "train.py" if command == "train" else f"-m fastgpt.{command}"
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"usage: python {typed} ")
    assert COMMANDS[command] in texts[0]
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
