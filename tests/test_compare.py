"""Planted differences between two runs are found, at their step, layer and kind of tensor."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgpt.compare import __main__ as compare
from fastgpt.compare import diverge
from fastgpt.compare.diverge import Side, difference
from fastgpt.errors import run_command
from fastgpt.files import sha256_of

SAVED = "checkpoints/step_00000004"


def signed(saved):
    """Renews the checksums of a checkpoint that was changed."""
    record = json.loads((saved / "checkpoint.json").read_text())
    record["sha256"] = {name: sha256_of(saved / name) for name in record["sha256"]}
    (saved / "checkpoint.json").write_text(json.dumps(record))


@pytest.fixture
def pair(fit, tmp_path):
    """Function that trains a run, and copies it with changed settings."""

    def make(flags="", *settings):
        a = fit("--steps 4 --optim.schedule constant", flags)
        b = shutil.copytree(a, tmp_path / "b")
        for file in (b / "config.json", b / SAVED / "config.json"):
            values = json.loads(file.read_text())
            for name, value in settings:
                section, _, field = name.rpartition(".")
                (values[section] if section else values)[field] = value
            file.write_text(json.dumps(values))
        signed(b / SAVED)
        return a, b

    return make


def answer(capsys, *argv):
    """Returns the exit status, and what was printed as JSON."""
    capsys.readouterr()
    status = compare.main([*map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


def change_weight(weights, _):
    weights["h.0.mlp.c_fc.weight"].view(torch.int32)[3, 5] ^= 1


def change_moment(_, state):
    state["optimizers"]["optimizers"][0]["state"][1]["exp_avg_sq"][2, 7] *= 1.0001


def change_order(_, state):
    state["loader"]["index"] = [1]


def other_dropout(run):
    run.plan = replace(run.plan, config=replace(run.plan.config, seed=5))


def other_kernel(run):
    run.model.h[0].ln_2.eps = 1e-3


def nan_gradient(run):
    def hook(gradient):
        return torch.full_like(gradient, math.nan) if run.step == 5 else None

    run.model.h[0].mlp.c_proj.weight.register_hook(hook)


@pytest.mark.parametrize(
    ("start", "name", "value", "expected"),
    [
        (4, "optim.lr", 0.005, (5, "parameter", "wte.weight", "")),
        (4, "optim.grad_clip", 0.01, (5, "optimizer state", "wte.weight", "exp_avg")),
        (0, "optim.weight_decay", 0.3, (1, "parameter", "wte.weight", "")),
        (0, "optim.beta2", 0.5, (1, "optimizer state", "wte.weight", "exp_avg_sq")),
        (4, "train.precision", "bf16", (5, "activation", "h.0.attn.c_attn", "output")),
        (4, "ops.attention", "sdpa", (5, "activation", "h.0.attn.c_proj", "input")),
        (4, "seed", 5, (5, "data", "tokens", "")),
        (4, "train.z_loss", 0.1, (5, "loss", "loss", "")),
    ],
)
def test_settings(start, name, value, expected, pair, capsys):
    a, b = pair("", (name, value))
    status, said = answer(capsys, a, b, "--diverge", "--start", start)
    assert [key for key, x in said["facts"].items() if x[0] != x[1]] == [f"settings.{name}"]
    assert (status, *said["diverges"].values())[:5] == (1, *expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (change_weight, (4, "parameter", "h.0.mlp.c_fc.weight", "")),
        (change_moment, (4, "optimizer state", "wpe.weight", "exp_avg_sq")),
        (change_order, (5, "data", "tokens", "")),
    ],
)
def test_checkpoint(change, expected, pair, capsys):
    a, b = pair()
    weights, state = load_file(b / SAVED / "model.safetensors"), torch.load(b / SAVED / "state.pt")
    change(weights, state)
    save_file(weights, b / SAVED / "model.safetensors")
    torch.save(state, b / SAVED / "state.pt")
    signed(b / SAVED)
    _, said = answer(capsys, a / SAVED, b / SAVED, "--diverge")
    assert tuple(said["diverges"].values())[:4] == expected
    if change is change_weight:
        assert said["diverges"]["how"].startswith("differs in 1 of 4,096 values, most at [3, 5]: ")
        _, said = answer(capsys, a, b / SAVED, "--diverge", "--bound", "1", "--steps", "2")
        assert said["diverges"] is None


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (other_dropout, (5, "activation", "dropout", "output")),
        (other_kernel, (5, "activation", "h.0.ln_2", "output")),
        (nan_gradient, (6, "gradient", "h.0.mlp.c_proj.weight", "")),
    ],
)
def test_diverge(plant, expected, pair, capsys, monkeypatch):
    a, b = pair("--model.dropout 0.1 --train.micro-batch 4")

    def side(config, warn, bound, other):
        new = Side(config, warn, bound, other)
        if other:
            plant(new.run)
        return new

    assert answer(capsys, a, b, "--diverge", "--steps", "3")[0] == 0
    monkeypatch.setattr(diverge, "Side", side)
    status, said = answer(capsys, a, b, "--diverge")
    assert (status, *said["diverges"].values())[:5] == (1, *expected)


@pytest.mark.parametrize(
    ("settings", "argv", "error"),
    [
        ([("train.batch_tokens", 64)], "", "a step has 1 x 8 sequences in A, 1 x 4 in B: expected"),
        ([("data.source", "gone.txt")], "", "gone.txt"),
        ([], "--start 3", "--start is 3: expected a step of both runs, which have [0, 4] and"),
    ],
)
def test_bad_input_is_one_line(settings, argv, error, pair, capfd, monkeypatch):
    a, b = pair("", *settings)
    capfd.readouterr()
    monkeypatch.setattr("sys.argv", ["compare", str(a), str(b), "--diverge", *argv.split()])
    with pytest.raises(SystemExit) as stopped:
        run_command(compare.main, error_status=2)
    assert stopped.value.code == 2
    assert re.fullmatch(rf"error: .*{re.escape(error)}.*\n", capfd.readouterr().err)


def test_records_of_other_types_are_left_out(pair, capsys):
    a, b = pair()
    with (b / "metrics.jsonl").open("a") as file:
        for damage in ({"step": "x"}, {"train_loss": "2"}, {"val_loss": [1]}, {"tok_per_s": "5"}):
            file.write(json.dumps({"step": 3, "tokens": 9} | damage) + "\n")
    _, said = answer(capsys, a, b)
    assert [key for key, x in said["facts"].items() if x[0] != x[1]] == []


def test_a_table_fits_a_terminal_and_losses_of_other_texts_are_not_compared(
    pair, capsys, monkeypatch
):
    a, b = pair("", ("recipe", "x" * 150))
    manifest = json.loads((b / "manifest.json").read_text())
    manifest["data"]["sha256"] = "f" * 64
    (b / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    capsys.readouterr()
    compare.main([str(a), str(b)])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "the texts differ: their losses cannot be compared" in printed


def test_other_architecture_is_the_difference(fit, tmp_path, capsys):
    a, b = fit("--steps 1"), fit(f"--steps 1 --model.dim 16 --run-dir {tmp_path / 'b'}")
    assert compare.main([str(a), str(b), "--diverge"]) == 1
    how = "parameter wte.weight has shape (300, 32) in A, (300, 16) in B"
    assert capsys.readouterr().out.endswith(f"\nfirst at the start, after step 1 {how}\n")


def test_not_a_number_equals_itself_and_zeros_have_signs():
    x = torch.tensor([math.nan, 0.0, math.inf])
    assert difference(x, x.clone(), 0.0) == ""
    assert "in 2 of 3 values, most at [2]: inf in A, -inf" in difference(x, -x, 0.0)
    assert difference(x[:2], -x[:2], 0.0).endswith("most at [1]: 0.0 in A, -0.0 in B")
    assert difference(x[:2], -x[:2], 1e-9) == ""
    assert difference(x[1:], x[:2], 9.0).startswith("differs in 2 of 2 values")
