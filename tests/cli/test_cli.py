"""The command line: a recipe, then a flag for every field."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from fastgpt import require_torch
from fastgpt.cli import configure
from fastgpt.config.config import to_json
from fastgpt.errors import UserError
from fastgpt.train.trainer import Trainer
from tests.processes import python


@pytest.mark.parametrize(("cuda", "recipe"), [(False, "baby"), (True, "gpt2-124m")])
def test_recipe_without_a_name(monkeypatch, cuda, recipe):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert configure([]) == configure([recipe])
    assert configure(["--steps", "3"]) == configure([recipe, "--steps", "3"])


def test_flags_go_over_the_recipe_and_nothing_else_changes():
    flags = "--model.num-layers 2 --optim.kind adamw --optim.lr 1e-4 --steps 7"
    config = configure(["baby", *flags.split()])
    values = to_json(configure(["baby"])).splitlines()
    changed = [line.strip() for line in to_json(config).splitlines() if line not in values]
    assert changed == ['"steps": 7,', '"num_layers": 2,', '"kind": "adamw",', '"lr": 0.0001,']


def test_flags_have_dashes_or_underscores():
    config = configure(["baby", "--log_every=3", "--run_dir", "somewhere"])
    assert config == configure(["baby", "--log-every", "3", "--run-dir=somewhere"])
    assert (config.log_every, str(config.run_dir)) == (3, "somewhere")


def test_gpt2_without_prepared_data_trains_on_bytes_and_says_so(tmp_path, monkeypatch, capfd):
    """Without prepared data gpt2-124m warns and trains on bytes, with GPT-2's vocabulary."""
    monkeypatch.setenv("FASTGPT_DATA", str(tmp_path / "data"))
    small = "--model.num-layers 1 --model.num-heads 1 --model.dim 8 --model.context 32"
    data = "--data.eval-tokens 64 --data.final-eval-tokens 64 --train.batch-tokens 64"
    argv = f"gpt2-124m {small} {data} --steps 1 --train.sample-tokens 0 --train.precision fp32"
    Trainer(configure([*argv.split(), "--run-dir", str(tmp_path / "run")])).fit()
    out = capfd.readouterr().out
    [warning] = [line for line in out.splitlines() if line.startswith("warning: no ")]
    assert f"--tokenizer gpt2 --out {tmp_path}" in warning
    weights = load_file(tmp_path / "run/checkpoints/step_00000001/model.safetensors")
    assert weights["wte.weight"].shape == (50_257, 8)


@pytest.mark.parametrize("command", ["train.py baby", "-m fastgpt.sample RUN", "-m bench --quick"])
def test_a_python_without_torch_is_named_with_what_to_run(command):
    done = python("-ES", *command.split())
    start = f"error: {sys.executable} (Python {sys.version.split()[0]}) has no torch; run "
    assert done.stderr.startswith(start)
    assert done.stderr.endswith(f".venv/bin/python -ES {command}\n")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(("there", "first"), [(True, "run venv/"), (False, "run `make setup`")])
def test_an_environment_that_is_missing_is_to_be_made_first(there, first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(require_torch, "find_spec", lambda name: None)
    monkeypatch.setattr(require_torch, "VENV_PYTHON", tmp_path / "venv" / "python")
    if there:
        (tmp_path / "venv").mkdir()
        (tmp_path / "venv" / "python").touch()
    with pytest.raises(SystemExit, match=first):
        require_torch.require_torch()


@pytest.mark.parametrize("flags", [["--help"], ["--tyro-print-completion", "bash"]])
def test_configure_prints_nothing(flags, capfd):
    with pytest.raises(UserError, match="no flag that prints"):
        configure(["baby", *flags])
    assert capfd.readouterr() == ("", "")
