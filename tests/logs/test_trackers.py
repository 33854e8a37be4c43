"""Trackers show all that a run logs, each record once, and can neither hold up nor end it."""

import json
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpt.cli import configure
from fastgpt.errors import UserError
from fastgpt.logs import trackers
from fastgpt.logs.metrics import read_records
from fastgpt.train.trainer import Trainer
from tests.runs import Crash, at_step, crash, outcome

FIGURES = {"train_loss": "loss/train", "lr": "optim/lr", "grad_norm": "optim/grad_norm",
           "val_loss": "loss/val", "epoch": "run/epoch",
           **{f"val_losses/{i}": f"loss/val_corpus/{i}" for i in range(2)}}  # fmt: skip


def events(run):
    """Returns of the figures what TensorBoard shows: (step, name) -> (number, time)."""
    board = EventAccumulator(str(run)).Reload()
    tags = {*FIGURES.values()} & {*board.Tags()["scalars"]}
    found = [((x.step, tag), (x.value, x.wall_time)) for tag in tags for x in board.Scalars(tag)]
    assert len(found) == len(dict(found)), "something is shown twice"
    return dict(found)


def test_tensorboard_shows_a_run_once_also_where_it_is_resumed(fit, tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_text("a < b & c > d. " * 40)
    source = f"--data.source {tmp_path}/text.txt=0.5,{tmp_path}/b.txt=0.5"
    at_step(monkeypatch, 7, crash)
    with pytest.raises(Crash):
        fit(source, "--steps 12 --track tensorboard")
    run = fit(source, "--resume auto --steps 12 --track tensorboard")
    expected = {}
    for record in read_records(run / "metrics.jsonl"):
        record |= {f"val_losses/{i}": x for i, x in enumerate(record.get("val_losses", ()))}
        shared = FIGURES.keys() & record.keys()
        values = {x: (pytest.approx(record[x], 1e-6), record["time"]) for x in shared}
        expected |= {(record["step"], FIGURES[x]): value for x, value in values.items()}
    assert events(run) == expected


def test_a_hosted_tracker_gets_each_record_once_under_one_id(tmp_path, monkeypatch):
    begun, shown = [], []
    run = SimpleNamespace(log=lambda x, step: shown.append((step, x)), finish=lambda: None)
    package = SimpleNamespace(
        login=lambda **_: False, Settings=lambda **_: None,
        init=lambda **given: begun.append(given) or run,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(trackers, "_await_end", lambda ended: ended.set())
    (tmp_path / "config.json").write_text('{"seed": 7}')
    records = [{"step": 0, "val_loss": 2.0}, {"step": 1, "lr": 0.5}, {"step": 1, "val_loss": 1.0}]
    for count in (1, 2, 2, 3):
        lines = "".join(f"{json.dumps(record)}\n" for record in records[:count])
        (tmp_path / "metrics.jsonl").write_text(f'{lines}{{"step": 9')
        trackers.follow("wandb", tmp_path)
    assert shown == [(0, {"loss/val": 2.0}), (1, {"optim/lr": 0.5}), (1, {"loss/val": 1.0})]
    assert {(x["id"], x["mode"], x["config"]["seed"]) for x in begun} == {
        (begun[0]["id"], "offline", 7)
    }


FAULTS = {"wandb": "raise RuntimeError('no server')", "trackio": "hang()"}
PACKAGE = """
import threading
def hang():
    threading.Thread(target=threading.Event().wait).start()  # not a daemon: Python waits for it
    threading.Event().wait()
def act(name):
    if name == {where!r}: {fault}
class init:
    url, offline = "https://example.org/run", False
    def __init__(self, *_, **__): act("start")
    def log(self, *_, **__): act("log")
    def finish(self): act("close")
Html = Settings = login = lambda *_, **__: True
"""


@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_one_that_raises_and_one_that_hangs_cost_nothing_but_what_they_would_show(
    fit, tmp_path, where, monkeypatch, capfd
):
    for name, fault in FAULTS.items():
        (tmp_path / f"{name}.py").write_text(PACKAGE.format(where=where, fault=fault))
        (about := tmp_path / f"{name}-9.dist-info").mkdir()
        (about / "METADATA").write_text(f"Name: {name}\nVersion: 9\n")
    without = fit(f"--run-dir {tmp_path / 'without'}")
    capfd.readouterr()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("fastgpt.logs.metrics.CLOSE_S", 3.0)
    run = fit("--track wandb trackio tensorboard")
    assert outcome(run) == outcome(without)
    out, err = capfd.readouterr()
    assert err.count("warning: wandb is turned off, training goes on: RuntimeError") == 1
    assert out.count("warning: ") == out.count("warning: trackio was ended") == 1
    assert {step for step, key in events(run) if key == "loss/val"} == {0, 4, 8}


def test_a_package_that_is_missing_is_said_before_anything_is_made(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("fastgpt.logs.metrics.installed", lambda name: None)
    with pytest.raises(UserError, match="--track wandb needs wandb: make setup EXTRAS=wandb"):
        Trainer(configure(tiny("--track wandb")))
    assert not (tmp_path / "run").exists()
