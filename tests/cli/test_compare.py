"""Planted differences between two runs are found."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgpt import compare
from fastgpt.files import sha256_of

SAVED = "checkpoints/step_00000004"


def signed(saved):
    """Renews the checksums of a checkpoint that was changed."""
    record = json.loads((saved / "checkpoint.json").read_text())
    record["sha256"] = {name: sha256_of(saved / name) for name in record["sha256"]}
    (saved / "checkpoint.json").write_text(json.dumps(record))


def change(file, name, value):
    """Changes a value of a JSON file, named as in `data.sha256`."""
    values = json.loads(file.read_text())
    section, _, field = name.rpartition(".")
    (values[section] if section else values)[field] = value
    file.write_text(json.dumps(values))


@pytest.fixture
def differing(trained, run, capsys):
    """Compares the trained run with its copy, or what else is given."""

    def differing(a=trained, b=run):
        capsys.readouterr()
        status = compare.main([str(a), str(b), "--json"])
        said = json.loads(capsys.readouterr().out)
        assert said["differs"] == bool(status)
        return status, [key for key, x in said["facts"].items() if x[0] != x[1]]

    return differing


@pytest.mark.parametrize(
    ("name", "value", "status"), [("optim.lr", 0.005, 1), ("seed", 5, 1), ("log_every", 3, 0)]
)
def test_settings(name, value, status, run, differing):
    for file in (run / "config.json", run / SAVED / "config.json"):
        change(file, name, value)
    assert differing() == (status, [f"settings.{name}"])


def test_weights_of_checkpoints(trained, run, differing):
    assert differing() == (0, [])
    weights = load_file(run / SAVED / "model.safetensors")
    weights["h.0.mlp.c_fc.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(weights, run / SAVED / "model.safetensors")
    signed(run / SAVED)
    found = differing(trained / SAVED, run / SAVED)
    assert found == (1, ["sha256 of the weights at step 4"])


def test_losses_at_the_first_the_furthest_and_the_last_step(run, differing):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        if "train_loss" in record and record["step"] in (3, 5, 6):
            record["train_loss"] += record["step"] == 5 or 0.5
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    said = ["first to differ", "differs most"]
    assert differing() == (1, [f"training loss, step {i} ({x})" for i, x in zip((3, 5), said)])


def test_records_of_other_types_are_left_out(run, differing):
    with (run / "metrics.jsonl").open("a") as file:
        for damage in ({"step": "x"}, {"train_loss": "2"}, {"val_loss": [1]}, {"tok_per_s": "5"}):
            file.write(json.dumps({"step": 3, "tokens": 9} | damage) + "\n")
    assert differing() == (0, [])


def test_losses_of_other_texts_are_not_compared(trained, run, capsys):
    change(run / "manifest.json", "data.sha256", "f" * 64)
    compare.main([str(trained), str(run)])
    assert "their losses cannot be compared" in capsys.readouterr().out
