"""The command line: a recipe, then a flag for every field."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from fastgpt.cli import configure
from fastgpt.config.config import to_json
from fastgpt.train.trainer import Trainer
from tests.processes import python


@pytest.mark.parametrize(("cuda", "recipe"), [(False, "baby"), (True, "gpt2-124m")])
def test_recipe_without_a_name(monkeypatch, cuda, recipe):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert configure([]) == configure([recipe])
    assert configure(["--steps", "3"]) == configure([recipe, "--steps", "3"])


def test_flags_go_over_the_recipe_and_nothing_else_changes():
    flags = "--model.num_layers=2 --optim.kind adamw --optim.lr 1e-4 --steps 7"
    config = configure(["baby", *flags.split()])
    values = to_json(configure(["baby"])).splitlines()
    changed = [line.strip() for line in to_json(config).splitlines() if line not in values]
    assert changed == ['"steps": 7,', '"num_layers": 2,', '"kind": "adamw",', '"lr": 0.0001,']


def test_gpt2_without_prepared_data_trains_on_bytes_and_says_so(tmp_path, monkeypatch, capfd):
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
