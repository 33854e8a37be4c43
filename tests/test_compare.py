"""Planted differences between two runs are found."""

import json
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgpt import compare
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


@pytest.mark.parametrize(
    ("name", "value", "status"), [("optim.lr", 0.005, 1), ("seed", 5, 1), ("log_every", 3, 0)]
)
def test_settings(name, value, status, pair, capsys):
    found, said = answer(capsys, *pair("", (name, value)))
    assert [key for key, x in said["facts"].items() if x[0] != x[1]] == [f"settings.{name}"]
    assert (found, said["differs"]) == (status, bool(status))


def test_weights_of_checkpoints(pair, capsys):
    a, b = pair()
    assert answer(capsys, a, b)[0] == 0
    weights = load_file(b / SAVED / "model.safetensors")
    weights["h.0.mlp.c_fc.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(weights, b / SAVED / "model.safetensors")
    signed(b / SAVED)
    status, said = answer(capsys, a / SAVED, b / SAVED)
    differing = [key for key, x in said["facts"].items() if x[0] != x[1]]
    assert (status, differing) == (1, ["sha256 of the weights at step 4"])


def test_bad_input_is_one_line(pair, capfd, monkeypatch):
    a, _ = pair()
    for other, error in (("gone", "gone does not exist"), (".", ". is neither a run nor a check")):
        capfd.readouterr()
        monkeypatch.setattr("sys.argv", ["compare", str(a), other])
        with pytest.raises(SystemExit) as stopped:
            run_command(compare.main, error_status=2)
        assert stopped.value.code == 2
        assert re.fullmatch(rf"error: {re.escape(error)}.*\n", capfd.readouterr().err)


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
