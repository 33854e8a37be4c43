"""Settings in YAML files are what was printed, and flags come after them."""

from dataclasses import replace

import pytest

from fastgpt.cli import answer, configure
from fastgpt.config.config import to_json
from fastgpt.config.files import to_yaml
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.saved import from_json
from fastgpt.errors import UserError


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return str(tmp_path / "run.yaml")

    return write


@pytest.mark.parametrize("name", RECIPES)
def test_settings_that_are_written_and_read_are_those_of_the_recipe(name, written):
    config = configure([name, "--init-from", "None"])  # a model to start from would be read
    assert config == replace(RECIPES[name][1], init_from=None)
    assert config.recipe == name
    assert from_json(to_json(config)) == config
    again = configure(["--config", written(to_yaml(config))])
    assert to_yaml(again) == to_yaml(config)


def test_a_file_replaces_the_recipe_and_flags_the_file(written):
    file = written("recipe: shakespeare-cpu\nsteps: 5\noptim: {lr: 6e-4, grad_clip: 2}\nseed: 3")
    config = configure(["--config", file, "--optim.lr", "1e-3"])
    assert (config.recipe, config.steps, config.seed) == ("shakespeare-cpu", 5, 3)
    assert (config.optim.lr, config.optim.grad_clip) == (1e-3, 2)
    assert configure(["shakespeare-cpu", "--config", written("optim: {lr: 6e-4}")]).optim.lr == 6e-4
    assert configure(["lecture-gpt-full", "--config", written("steps: 7")]).epochs is None
    assert configure(["--config", written("track: [wandb, trackio]")]).track == ("wandb", "trackio")


def test_words_and_numbers_are_those_of_yaml_1_2_and_what_is_printed_is_yaml(written):
    config = configure(["baby", "--config", written("seed: 010\ntrain: {compile: off}")])
    assert (config.seed, config.train.compile) == (10, "off")
    printed = answer(["shakespeare-cpu", "--steps", "7", "--print-config"])
    assert configure(["--config", written(printed)]).steps == 7


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("stepz: 3", "", r"run\.yaml 'stepz'; did you mean 'steps'"),
        ("run_dir: x\nresume: auto", "", "'run_dir'"),
        ("model: 3", "", "model of .* is 3: expected settings by name"),
        ("seed: true", "", "--seed is True"),
        ("track: wandb", "", r"expected none or a list .tensorboard or wandb or trackio, \.\.\."),
        ("train: {z_loss: 1}\ntrain: {}", "", "line 2: found duplicate key"),
        (f"a: &a [1]\nb: [{','.join(['*a'] * 9)}]", "", "line 2: expected a value, not an alias"),
        (f"steps: {'[' * 5000}", "", "line 1: maximum depth"),
        ("steps: !!bool x", "", r"run\.yaml cannot be read"),
        ("recipe: baby", "gpt2-124m", "is of recipe baby: expected that, not gpt2-124m"),
        ("steps: 3\nepochs: 2", "", "steps and epochs are both in"),
        ("steps: 3", "--resume auto", "a resumed run has its settings"),
    ],
)
def test_bad_files_are_one_line(text, flags, said, written):
    with pytest.raises(UserError, match=said):
        configure([*flags.split(), "--config", written(text)])
