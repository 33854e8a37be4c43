"""A run that is asked to stop saves first; one process at a time trains in a folder."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastgpt.checkpoint import checkpoint
from fastgpt.cli import configure
from fastgpt.convert.source import load
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.logs.metrics import read_records
from fastgpt.model.gpt import GPT
from fastgpt.parallel.signals import StopSignal
from fastgpt.train.trainer import Trainer
from tests.checkpoint.conftest import STEPS
from tests.processes import ROOT, read_until, script
from tests.runs import at_step, before_each, outcome, series


@pytest.mark.parametrize(
    ("forward", "saved"),
    [pytest.param(2, 0, marks=pytest.mark.cpu), (20, 1), (39, 4)],  # CUDA tries a step
)
def test_stop_signal_is_answered_before_the_next_forward(
    fit, unbroken, monkeypatch, capfd, forward, saved
):
    """An evaluation is 5 forwards here, a step 8."""
    calls = []

    def interrupt(*_, **__):
        calls.append(1)
        if len(calls) == forward:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for `command &` in a script
    with monkeypatch.context() as patch:
        before_each(patch, GPT, "forward", interrupt)
        run = fit(f"{STEPS} --train.micro-batch 1")
    signal.signal(signal.SIGINT, before)
    assert len(calls) == forward
    last = checkpoint.steps_on_disk(run / "checkpoints")[-1]
    assert last == checkpoint.step_path(run / "checkpoints", saved)
    out = capfd.readouterr().out
    assert "SIGINT: stopping" in out
    assert f"stopped after step {saved}, saved in {last}\nto resume: {sys.executable} /" in out
    Trainer(configure(["--resume", str(run)])).fit()
    assert outcome(run) == unbroken("--train.micro-batch 1")


@pytest.fixture
def stop():
    """A `StopSignal`, and the lines that it has said."""
    said, before = [], signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    stop = StopSignal(said.append)
    yield stop, said
    stop.restore()
    signal.signal(signal.SIGHUP, before)


def test_a_signal_that_a_wrapper_passes_on_again_is_one_request(stop):
    _, said = stop
    again = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    again.start()
    signal.raise_signal(signal.SIGINT)
    again.join()
    assert [line[:7] for line in said] == ["SIGINT:"]
    with pytest.raises(KeyboardInterrupt):  # later ones count
        signal.raise_signal(signal.SIGINT)


def test_sigterm_at_the_time_limit_cuts_no_save_short_that_sigusr1_or_sighup_began(stop):
    stop, said = stop
    for name in ("HUP", "HUP", "USR1", "USR1", "TERM"):
        assert stop.requeue == (len(said) > 2)
        signal.raise_signal(signal.Signals[f"SIG{name}"])
    assert [line[:7] for line in said] == ["SIGHUP:"] * 2 + ["SIGUSR1"] * 2 + ["SIGTERM"]
    # without Python, so that the next one ends an operation of PyTorch's as well
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ignored_a_hangup_stays_so_and_an_interrupt_is_heard_before_training(capfd):
    before = [signal.signal(sent, signal.SIG_IGN) for sent in (signal.SIGHUP, signal.SIGINT)]
    stop = StopSignal([].append)
    of_hangup = signal.getsignal(signal.SIGHUP)
    stop.restore()
    with pytest.raises(SystemExit), shown_in_one_line():
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGHUP, before[0])
    signal.signal(signal.SIGINT, before[1])
    assert of_hangup == signal.SIG_IGN
    assert capfd.readouterr().err == "interrupted\n"


def test_a_run_outside_of_the_main_thread_needs_no_signals(fit):
    with ThreadPoolExecutor(1) as pool:
        assert series(pool.submit(fit, "--steps 2").result(), "train_loss").keys() == {1, 2}


def test_run_in_use_is_resumed_by_no_second_process_but_may_be_sampled_from(fit, tiny):
    run = fit("--steps 4")
    before = (run / "metrics.jsonl").read_bytes()
    first = Trainer(configure(tiny("--resume auto --steps 8")))
    with pytest.raises(UserError, match=r"is in use: .*, or stop it$"):
        Trainer(configure(tiny(f"--resume {run / 'checkpoints' / 'step_00000004'}")))
    with pytest.raises(UserError, match=r"is in use: .* --run-dir$"):
        Trainer(configure(tiny()))
    assert (run / "metrics.jsonl").read_bytes() == before
    load(run)
    first.fit()
    Trainer(configure(tiny("--resume auto --steps 9"))).fit()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: run.rename(f"{run}2"), r"moved .*run2/.*step_00000004; .* --resume \S*/run2$"),
        (lambda run: shutil.rmtree(run.rename(f"{run}2")), r"moved or removed.*; nothing is left"),
        (lambda run: (run / ".lock").unlink(), r"may be training there: this run ends; .*step_0"),
    ],
)
def test_run_whose_folder_or_lock_is_lost_ends_at_its_next_save(
    tiny, tmp_path, unbroken, monkeypatch, damage, said
):
    run = tmp_path / "run"
    trainer = Trainer(configure(tiny(STEPS)))
    at_step(monkeypatch, 6, lambda: trainer.recorder.saver.wait() or damage(run))
    with pytest.raises(UserError, match=said):
        trainer.fit()
    assert not (run / "checkpoints" / "step_00000008").exists()
    if not run.exists() and (moved := tmp_path / "run2").exists():
        Trainer(configure(["--resume", str(moved)])).fit()
        assert outcome(moved) == unbroken()


def test_signal_saves_exits_and_prints_a_command_that_goes_on(tiny, tmp_path):
    """The space in the folder's name must survive being copied into a shell."""
    run = tmp_path / "a run"
    # so many steps that the signal always comes before the last
    argv = [*tiny("--eval-every 0 --log-every 5 --steps 5000"), "--run-dir", str(run)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *argv],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    read_until(process, r"^step +20/")
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, "")
    match = re.search(r"stopped after step (\d+), saved in .*\nto resume: (.*)\n$", out)
    assert match, out
    step, command = int(match[1]), shlex.split(match[2])
    [saved] = checkpoint.steps_on_disk(run / "checkpoints")
    assert (checkpoint.load(saved).step, saved.name) == (step, f"step_{step:08d}")
    done = script(*command[1:], "--steps", step + 5, "--optim.schedule", "constant")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_records(run / "metrics.jsonl")[-1]["step"] == step + 5
