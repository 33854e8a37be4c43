"""The help of each command: its flags with text and default, plain and at most 80 columns wide."""

import re
import shlex
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

import fastgpt
from fastgpt import __main__ as page
from fastgpt import cli, compare, prepare, sample
from fastgpt.config.config import COMMON
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
    "python train.py": (train, "--data.source: text"),
    "python -m fastgpt.sample": (sample.main, "--prompt: "),
    "python -m fastgpt.prepare": (prepare.main, "--out: a path"),
    "python -m fastgpt.data": (data.main, "--tokenizer: text"),
    "python -m fastgpt.evaluate": (evaluate.main, "--tasks: "),
    "python -m fastgpt.compare": (compare.main, "--json, --no-json"),
    "python -m fastgpt.doctor": (doctor.main, "--gpus "),
    "python -m fastgpt.convert": (convert.main, "--dtype: "),
    "python -m fastgpt.serve": (serve.main, "--slots: an integer"),
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
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"python -m fastgpt.doctor"}))
def test_a_wrong_flag_ends_with_status_2(command):
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda _: COMMANDS[command][0](["--nonsense"]))
    assert stopped.value.code == 2


def test_help_is_of_the_recipe_that_is_named_on_either_side(printed):
    said = printed(train, "--help lecture-head")
    assert said == printed(train, "lecture-head --help")
    assert "--model.num-layers: an integer (default: 1)\n" in said


def test_the_flags_that_people_use_come_with_help_and_the_others_with_help_all(printed):
    said, rest = printed(train, "baby --help"), printed(train, "baby --help-all")
    assert len(re.findall(r"^  --", said, re.M)) == len(COMMON) == 20
    assert len(said.splitlines()) <= 70
    assert "--help-all" in said
    assert {*re.findall(r"^  --\S+", said, re.M)} < {*re.findall(r"^  --\S+", rest, re.M)}


def test_all_flags_are_explained_in_sentences(printed):
    words = " ".join(printed(train, "pubmed --help-all").split())
    settings = RECIPES["pubmed"][1]
    sections = {f"{field.name}.": getattr(settings, field.name) for field in fields(settings)}
    for section, kind in {"": settings, **sections}.items():
        for name, text in field_texts(type(kind)) if is_dataclass(kind) else ():
            first = re.sub(r" \[.*\]$", "", text).replace("&lt;", "<")
            assert first[0].isupper()
            assert first.endswith(".")
            assert re.search(rf"--{section}{name.replace('_', '-')}[:,]", words)
            assert first in words
    assert "--recipe" not in words
    assert "--model.context: an integer (default: 512) Longest sequence, in tokens." in words
    assert "--optim.kind: adamw or muon (default: adamw)" in words
    assert "--model.tied, --model.no-tied (default: False)" in words


def test_all_recipes_are_listed(printed):
    lines = printed(train, "--list-recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    for line, (about, _) in zip(lines, RECIPES.values()):
        assert line.endswith(f" {about}")
        assert len(line) <= 80


def test_python_m_fastgpt_lists_every_command():
    rooms = {path.parent.name for path in Path(fastgpt.__file__).parent.glob("*/__main__.py")}
    listed = re.findall(r"^python -m fastgpt\.(\w+) .{,60}$", str(page.__doc__), re.M)
    assert {*listed} == rooms | {"cli", "compare", "prepare", "sample"}


def test_version_is_that_of_the_newest_release(printed):
    changes = Path(__file__).parents[2].joinpath("CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", changes, re.M)[0]
    assert printed(train, "--version") == f"fastgpt {newest}\n"
