"""A run directory is complete, says where it is, and is never mixed up with another."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import train
from fastgpt.cli import parse
from fastgpt.metrics import MetricsLog, read_records
from fastgpt.trainer import Trainer

EXPECTED = {
    "config.json",
    "manifest.json",
    "metrics.jsonl",
    "checkpoints",
    "samples.txt",
    "loss.png",
}


def test_everything_is_there_and_nothing_else(fit):
    run = fit()
    names = {path.name for path in run.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    assert names - events == EXPECTED
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"step_00000004", "step_00000008", "best"}


@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        ("", [4, 8]),
        ("--save-every 3", [4, 6, 8]),
        ("--eval-every 0", [8]),
        ("--save-every 1 --train.keep-checkpoints 2", [7, 8]),
    ],
)
def test_checkpoints_are_of_the_steps_asked_for(fit, flags, saved):
    folder = fit(flags, "--train.sample-tokens 0") / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == [f"step_{n:08d}" for n in saved]


def test_saved_before_it_is_evaluated(fit, monkeypatch):
    """A crash in an evaluation must not cost the steps before it."""
    write, saved = MetricsLog.write, []

    def look(self, record):
        if "val_loss" in record and record["step"]:
            name = f"step_{record['step']:08d}"
            saved.append((self.path.parent / "checkpoints" / name / "checkpoint.json").exists())
        write(self, record)

    monkeypatch.setattr(MetricsLog, "write", look)
    fit()
    assert saved == [True, True]


def test_crash_at_the_start_of_a_resume_leaves_the_run_resumable(fit, monkeypatch):
    fit("--steps 4")
    write = Path.write_text

    def cut_short(self, content, *args, **kwargs):
        write(self, content[:10], *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_short)
    with suppress(KeyboardInterrupt):
        fit("--resume auto")
    monkeypatch.setattr(Path, "write_text", write)
    assert read_records(fit("--resume auto") / "metrics.jsonl")[-1]["step"] == 8


def test_name_is_the_recipe_and_the_time(tiny, tmp_path, monkeypatch):
    """Two runs of one second do not meet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20240102-030405")
    argv = tiny("--steps 1")
    at = argv.index("--run-dir")
    del argv[at : at + 2]
    for _ in range(2):
        Trainer(parse(argv)).fit()
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["baby-20240102-030405", "baby-20240102-030405-2"]


def test_terminal_shows_the_run(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train.py", *tiny("--log-every 2")])
    train.main()
    out, err = capfd.readouterr()
    lines = out.splitlines()
    heads = [line.split("  ")[0] for line in lines[:10]]
    assert heads == [
        "recipe", "device", "model", "data", "training", "epochs", "estimate", "ops", "MFU", "run",
    ]  # fmt: skip
    data = json.loads((tmp_path / "run" / "manifest.json").read_text())["data"]
    assert data["sha256"][:16] in lines[3]
    assert "655 + 73" in lines[3]
    shown = [line for line in lines if line.startswith("step")]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert len(shown) == len(records)
    for line, record in zip(shown, records):
        loss = record.get("train_loss", record.get("val_loss"))
        assert f"loss {loss:.4f}" in line
    assert "--- sample ---" in lines
    assert lines[-1] == f"done: {tmp_path / 'run'}"
    assert err == ""
    assert "\x1b" not in out, "colours and bars are for terminals"
