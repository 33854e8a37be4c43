"""Trackers show all that a run logs, each record once, and can neither hold up nor end it."""

import json
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpt.cli import configure
from fastgpt.config.config import to_json
from fastgpt.convert.saved import saved_config
from fastgpt.errors import UserError
from fastgpt.logs import trackers
from fastgpt.logs.metrics import read_records
from fastgpt.train.trainer import Trainer
from tests.processes import ROOT, python
from tests.runs import Crash, at_step, crash, outcome

# --- what each shows, read by itself: [(step, name, number)] and the settings ---------------------


def in_tensorboard(run):
    board = EventAccumulator(str(run)).Reload()
    tags = board.Tags()["scalars"]
    return [(event.step, tag, event.value) for tag in tags for event in board.Scalars(tag)], None


def in_wandb(run):
    shown, config, ids = [], {}, set()
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        read = python("-m", "wandb", "leet", "inspect", "--json", file)
        for record in map(json.loads, read.stdout.splitlines()):
            if record["type"] == "run":
                config |= record["run"]["config"]["update"]
                ids.add(record["run"]["run_id"])
            if record["type"] == "history":
                row = record["history"]["item"]
                shown += [(row["_step"], key, row[key]) for key in row if key[0] != "_"]
    assert len(ids) == 1
    return shown, config


def in_trackio(run):
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("fastgpt")
    rows = SQLiteStorage.get_logs("fastgpt", name)
    shown = [(row["step"], key, x) for row in rows for key, x in row.items()]
    return shown, SQLiteStorage.get_run_config("fastgpt", name)


FIGURES = {"train_loss": "loss/train", "lr": "optim/lr", "grad_norm": "optim/grad_norm",
           "val_loss": "loss/val", "epoch": "run/epoch",
           **{f"val_losses/{i}": f"loss/val_corpus/{i}" for i in range(2)}}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tensorboard", in_tensorboard),
        pytest.param("wandb", in_wandb, marks=pytest.mark.slow),
        pytest.param("trackio", in_trackio, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_shown_once_also_where_it_is_resumed(fit, name, read, tmp_path, monkeypatch):
    """The packages themselves, without a network, an account or an answer on standard input."""
    for variable in ("HOME", "TRACKIO_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    pytest.importorskip(name)
    (tmp_path / "b.txt").write_text("a < b & c > d. " * 40)
    source = f"--data.source {tmp_path}/text.txt=0.5,{tmp_path}/b.txt=0.5"
    at_step(monkeypatch, 7, crash)
    with pytest.raises(Crash):
        fit(source, f"--steps 12 --track {name}")
    run = fit(source, f"--resume auto --steps 12 --track {name}")
    expected, logged = {}, read_records(run / "metrics.jsonl")
    for record in logged:
        record |= {f"val_losses/{i}": x for i, x in enumerate(record.get("val_losses", ()))}
        shared = FIGURES.keys() & record.keys()
        expected |= {(record["step"], FIGURES[x]): pytest.approx(record[x], 1e-6) for x in shared}
    shown, settings = read(run)
    found = [x for x in shown if x[1] in FIGURES.values() and x[2] is not None]
    assert len(found) == len(expected), "something is shown twice, or not at all"
    assert {(step, key): x for step, key, x in found} == expected
    if name != "tensorboard":
        assert settings.items() >= json.loads(to_json(saved_config(run))).items()
    else:
        times = [x.wall_time for x in EventAccumulator(str(run)).Reload().Scalars("loss/train")]
        assert times == [record["time"] for record in logged if "train_loss" in record]


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
    assert {step for step, key, _ in in_tensorboard(run)[0] if key == "loss/val"} == {0, 4, 8}


def test_a_package_that_is_missing_is_said_before_anything_is_made(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("fastgpt.logs.metrics.installed", lambda name: None)
    with pytest.raises(UserError, match="--track wandb needs wandb: make setup EXTRAS=wandb"):
        Trainer(configure(tiny("--track wandb")))
    monkeypatch.setattr("fastgpt.commands.CHECKOUT", tmp_path)  # as where there is no clone
    with pytest.raises(UserError, match="pip install wandb"):
        Trainer(configure(tiny("--track wandb")))
    assert not (tmp_path / "run").exists()


def test_a_system_without_unix_shows_the_run_too(fit, tmp_path):
    """Removes what Python has on Unix alone; a tracker that hangs after its run is ended."""
    run = fit("--steps 4")
    script = tmp_path / "elsewhere.py"
    script.write_text(
        "import os, runpy, select, signal, subprocess, sys\n"
        "from fastgpt.logs import metrics\nmetrics.CLOSE_S = 1 if 'trackio' in sys.argv else 60\n"
        "def refuse(*_): raise OSError(10038, 'not a socket')\n"
        "select.select = select.poll = refuse\n"
        "del os.nice, signal.SIGUSR1, signal.alarm\n"
        "runpy.run_module('fastgpt.logs.trackers', run_name='__main__', alter_sys=True)\n"
    )
    (tmp_path / "trackio.py").write_text(PACKAGE.format(where="close", fault="hang()"))
    done = python(script, "tensorboard", run)
    assert (done.returncode, done.stderr) == (0, "")
    assert {step for step, key, _ in in_tensorboard(run)[0] if key == "loss/val"} == {0, 4}
    assert python(script, "trackio", run, PYTHONPATH=f"{tmp_path}:{ROOT}").returncode == 1
