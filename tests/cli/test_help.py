"""The help of each command: its flags with type and default."""

import re

import pytest
import torch

import fastgpt
from fastgpt.cli import answer
from fastgpt.config.config import COMMON
from fastgpt.config.recipes import RECIPES
from tests.cli.conftest import main_of

COMMANDS = ("sample", "prepare", "data", "evaluate", "compare", "doctor", "convert", "report")


@pytest.mark.parametrize("command", [*COMMANDS, "serve"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main_of(f"fastgpt.{command}")(["-h"])
    assert not stopped.value.code
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m fastgpt.{command} ")
    assert re.search(r"^  --", said, re.M)


def test_help_is_of_the_recipe_that_is_named_on_either_side(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = answer(["--help", "lecture-head"])
    assert said == answer(["lecture-head", "--help"]) != answer(["--help"])
    assert "--model.num-layers: an integer (default: 1)\n" in said


def test_common_flags_come_with_help_and_the_others_with_help_all():
    said, rest = answer(["pubmed", "--help"]), answer(["pubmed", "--help-all"])
    assert len(re.findall(r"^  --", said, re.M)) == len(COMMON)
    assert {*re.findall(r"^  --\S+", said, re.M)} < {*re.findall(r"^  --\S+", rest, re.M)}
    assert "--recipe" not in rest
    assert [line.split()[0] for line in answer(["--list-recipes"]).splitlines()] == list(RECIPES)
    assert answer(["baby", "--version"]) == f"fastgpt {fastgpt.__version__}"
