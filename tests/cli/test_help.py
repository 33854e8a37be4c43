"""The help of each command: every flag with its text and default, plain and within the terminal."""

import re
import shlex
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

import fastgpt
from fastgpt import __main__ as page
from fastgpt import cli, prepare, sample
from fastgpt.compare import __main__ as compare
from fastgpt.config.recipes import RECIPES
from fastgpt.convert import __main__ as convert
from fastgpt.data import __main__ as data
from fastgpt.doctor import __main__ as doctor
from fastgpt.errors import run_command
from fastgpt.evaluate import __main__ as evaluate
from fastgpt.serve import __main__ as serve
from tests.api import field_texts


def train(argv):
    sys.exit(cli.main(argv))


COMMANDS = {
    "python train.py": (train, "--data.source STR"),
    "python -m fastgpt.sample": (sample.main, "--prompt STR"),
    "python -m fastgpt.prepare": (prepare.main, "--out PATH"),
    "python -m fastgpt.data": (data.main, "--tokenizer STR"),
    "python -m fastgpt.evaluate": (evaluate.main, "--tasks STR"),
    "python -m fastgpt.compare": (compare.main, "--diverge"),
    "python -m fastgpt.doctor": (doctor.main, "--gpus "),
    "python -m fastgpt.convert": (convert.main, "--dtype "),
    "python -m fastgpt.serve": (serve.main, "--slots INT"),
}


@pytest.fixture
def printed(monkeypatch, capsys):
    """Returns the output of a command at 80 columns that exits with status 0."""

    def run(main, argv: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(shlex.split(argv))
        assert not stopped.value.code
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return run


@pytest.mark.parametrize("argv", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, argv, printed, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main, flag = COMMANDS[command]
    said = printed(main, argv)
    assert said.startswith(f"usage: {command} ")
    assert flag in said
    assert "\x1b" not in said
    assert max(map(len, said.split("\n\n", 2)[2].splitlines())) <= 80


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"python -m fastgpt.doctor"}))
def test_a_wrong_flag_ends_with_status_2(command):
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda _: COMMANDS[command][0](["--nonsense"]))
    assert stopped.value.code == 2


def test_help_is_of_the_recipe_that_is_named_on_either_side(printed):
    said = printed(train, "--help lecture-head")
    assert said == printed(train, "lecture-head --help")
    assert "Number of transformer blocks. (default: 1)" in said


def test_all_flags_are_explained_in_sentences(printed):
    words = " ".join(printed(train, "pubmed --help").split())
    settings = RECIPES["pubmed"][1]
    sections = {f"{field.name}.": getattr(settings, field.name) for field in fields(settings)}
    for section, kind in {"": settings, **sections}.items():
        for name, text in field_texts(type(kind)) if is_dataclass(kind) else ():
            first = re.sub(r" \[.*\]$", "", text).replace("&lt;", "<")
            assert first[0].isupper()
            assert first.endswith(".")
            assert re.search(rf"--{section}{name.replace('_', '-')}[ ,]", words)
            assert first in words
    assert "--recipe" not in words
    assert "Longest sequence, in tokens. (default: 512)" in words
    assert "{adamw,muon}" in words


def test_all_recipes_are_listed(printed):
    lines = printed(train, "--list-recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    for line, (about, _) in zip(lines, RECIPES.values()):
        assert line.endswith(f" {about}")
        assert len(line) <= 80


def test_python_m_fastgpt_lists_every_command():
    rooms = {path.parent.name for path in Path(fastgpt.__file__).parent.glob("*/__main__.py")}
    listed = re.findall(r"^python -m fastgpt\.(\w+) .{,60}$", str(page.__doc__), re.M)
    assert {*listed} == rooms | {"cli", "prepare", "sample"}


def test_version_is_that_of_the_newest_release(printed):
    changes = Path(__file__).parents[2].joinpath("CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changes, re.M)[0]
    assert printed(train, "--version") == f"fastgpt {newest}\n"
