"""The help of each command at 80 columns is the text in tests/cli/help.

To accept a change: `UPDATE=1 python -m pytest tests/cli/test_help.py`.
"""

import os
import re
from pathlib import Path

import pytest
import torch

from fastgpt import cli, explain, flags, prepare, sample
from fastgpt.config.config import Config
from fastgpt.config.recipes import RECIPES
from fastgpt.data import __main__ as data
from fastgpt.evaluate import __main__ as evaluate

SNAPSHOTS = Path(__file__).with_name("help")
COMMANDS = {
    "train": lambda: cli.parse(["--help"]),
    "recipes": lambda: cli.parse(["--list-recipes"]),
    "sample": lambda: sample.main(["--help"]),
    "prepare": lambda: prepare.main(["--help"]),
    "data": lambda: data.main(["--help"]),
    "evaluate": lambda: evaluate.main(["--help"]),
    "explain": lambda: explain.main(["-h"]),
}


@pytest.fixture
def printed(monkeypatch, capsys):
    """Returns the output of a command at 80 columns that exits with status 0."""

    def run(command) -> str:
        with pytest.raises(SystemExit) as stopped:
            command()
        assert not stopped.value.code
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, printed):
    path, said = SNAPSHOTS / f"{name}.txt", printed(COMMANDS[name])
    if os.environ.get("UPDATE"):
        path.write_text(said)
    assert said == path.read_text()
    assert max(map(len, said.splitlines())) <= 80


def test_help_is_of_the_recipe_that_is_named_on_either_side(printed):
    after, before = ["--help", "lecture-head"], ["lecture-head", "--help"]
    assert printed(lambda: cli.parse(after)) == (said := printed(lambda: cli.parse(before)))
    assert "--model.num-layers    Number of transformer blocks. [1]" in said


def test_all_flags_are_explained_in_sentences(printed):
    said = printed(lambda: cli.parse(["pubmed", "--help-all"]))
    assert max(map(len, said.splitlines())) <= 80
    words = " ".join(said.split())
    for flag in flags.flags_of(Config, RECIPES["pubmed"][1]):
        assert flag.text[0].isupper()
        assert flag.text.endswith(".")
        assert f" {flag.name} {flag.help()}" in words
    assert "--recipe" not in words
    assert "--model.context Longest sequence, in tokens. [512]" in words
    assert "{adamw, muon}" in words


def test_version_is_that_of_the_newest_release(printed):
    changes = Path(__file__).parents[2].joinpath("CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changes, re.M)[0]
    assert printed(lambda: cli.parse(["--version"])) == f"fastgpt {newest}\n"
