"""A run that was interrupted, in any way, continues with the same bits as one that was not."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpt.checkpoint import checkpoint
from fastgpt.cli import configure
from fastgpt.convert.source import load
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.logs.metrics import MetricsLog, read_records
from fastgpt.model.gpt import GPT
from fastgpt.parallel.signals import StopSignal
from fastgpt.run.directory import RunLock
from fastgpt.train.build import Run
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer
from tests.processes import ROOT
from tests.runs import Crash, at_step, before_each, crash, outcome, read_until, series, terminate
from tests.warm import warm

STEPS = "--steps 12 --model.dropout 0.2"


@pytest.fixture
def unbroken(fit, tmp_path):
    def run(*flags):
        return outcome(fit(STEPS, *flags, f"--run-dir {tmp_path / 'unbroken'}"))

    return run


# --- in one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [crash, terminate])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("sampling", ["epoch", "random-windows"])
def test_resumed_run_equals_the_unbroken_one(fit, unbroken, monkeypatch, sampling, kind, cut):
    """A run that is interrupted after step 7 and resumed equals an uninterrupted one.

    Step 7 is in the second epoch, between two checkpoints, and has 2 micro-steps.
    """
    flags = f"{STEPS} --optim.kind {kind} --data.sampling {sampling} --train.micro-batch 4"
    at_step(monkeypatch, 7, cut)
    with pytest.raises(Crash) if cut is crash else nullcontext():
        run = fit(flags)
        assert checkpoint.steps_on_disk(run / "checkpoints")[-1].name == "step_00000007"
    assert outcome(fit(flags, "--resume auto")) == unbroken(flags)


def test_flags_of_a_resumed_run_reach_the_optimizers(fit):
    run = fit("--steps 2 --optim.kind muon")
    flags = ["--resume", str(run), "--steps", "3", "--optim.weight-decay", "0.3"]
    trainer = Trainer(configure([*flags, "--optim.beta2", "0.5", "--optim.beta1", "0.5"]))
    adamw, muon = (it.param_groups for it in trainer.run.optimizers.all)
    assert [(group["weight_decay"], group["betas"][1]) for group in adamw] == [(0.3, 0.5), (0, 0.5)]
    assert [(group["weight_decay"], group["momentum"]) for group in muon] == [(0.3, 0.75)]
    trainer.fit()


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_killed_before_its_first_checkpoint_it_starts_again_and_keeps_its_log(
    fit, unbroken, tmp_path, monkeypatch, capfd, resume
):
    run, logs = tmp_path / "run", []
    flags = ["--resume", "auto", "--run-dir", str(run)]
    if resume == "path":
        flags = ["--resume", str(run)]
    for attempt in range(2):
        at_step(monkeypatch, 2, crash)
        with pytest.raises(Crash):
            Trainer(configure(flags)).fit() if attempt else fit(STEPS, "--track tensorboard")
        logs.append((run / "metrics.jsonl").read_bytes())
    capfd.readouterr()
    Trainer(configure(flags)).fit()
    said = f"{run} has no checkpoint yet: starting from its first step; its earlier logs are kept"
    assert f"warning: {said} in {run}/abandoned_2\n" in capfd.readouterr().out
    assert outcome(run) == unbroken()
    for folder, log in zip(("abandoned_1", "abandoned_2"), logs):
        assert (run / folder / "metrics.jsonl").read_bytes() == log
        assert len(list((run / folder).glob("events.out.*"))) == 1
    assert len(list(run.glob("events.out.*"))) == 1


def test_resume_shows_where_it_starts_and_is_kept_in_the_manifest(fit, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["first"])
    run = fit("--steps 4")
    first = json.loads((run / "manifest.json").read_text())
    assert (first["command"], first["resumed_from_step"]) == (["first"], None)
    monkeypatch.setattr(sys, "argv", ["second"])
    fit("--steps 6 --optim.lr 0.1 --resume auto")
    out = capfd.readouterr().out
    assert f"\nresumed     from {run}/checkpoints/step_00000004, step 4\n" in out
    assert out.count("changed: ") == 2
    assert "\nchanged: optim.lr 0.004 -> 0.1\n" in out
    assert "finished" not in out
    settings = (run / "config.json").read_bytes()
    Trainer(
        configure(["--resume", str(run), "--optim.muon-lr", "9", "--data.eval-tokens", "64"])
    ).fit()
    out = capfd.readouterr().out
    assert "\nchanged: optim.muon_lr 0.02 -> 9.0\n" in out
    assert "\nthis run is finished: it has taken its 6 steps\n" in out
    assert (run / "config.json").read_bytes() == settings  # no step was taken with the others
    assert out.endswith(f" --resume {run} --steps 12\n")
    manifest = json.loads((run / "manifest.json").read_text())
    resumes = manifest.pop("resumes")
    assert manifest == first
    starts = [(entry["command"], entry["resumed_from_step"]) for entry in resumes]
    assert starts == [(["second"], 4), (["second"], 6)]


@pytest.mark.parametrize(
    ("forward", "saved"),
    [pytest.param(2, 0, marks=pytest.mark.cpu), (8, 0), (20, 1), (39, 4)],  # CUDA tries a step
    ids=["first-evaluation", "first-step", "second-step", "evaluation"],
)
def test_stop_signal_is_answered_before_the_next_forward(
    fit, unbroken, monkeypatch, capfd, forward, saved
):
    """Ctrl-C stops a run before its next forward pass; resumed, it has lost nothing.

    An evaluation is 5 forwards here, a step 8.
    """
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
    assert "SIGINT: stopping after this micro-step or evaluation batch" in out
    assert "; press Ctrl-C again to stop at once, without saving\n" in out
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


def test_second_signal_ends_the_process(stop):
    signal.raise_signal(signal.SIGTERM)
    # without Python, so that it ends an operation of PyTorch's as well
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_a_wrapper_passes_on_again_is_one_request(stop):
    _, said = stop
    again = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    again.start()
    signal.raise_signal(signal.SIGINT)
    again.join()
    assert [line[:7] for line in said] == ["SIGINT:"]
    with pytest.raises(KeyboardInterrupt):  # later ones count
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_does_not_save_says_how_to_go_on(tiny, tmp_path, monkeypatch, capfd):
    at_step(monkeypatch, 6, lambda: signal.default_int_handler(0, None))
    with pytest.raises(SystemExit), shown_in_one_line():
        Trainer(configure(tiny(STEPS))).fit()
    line = capfd.readouterr().err
    assert line.startswith("interrupted at step 6, ")
    assert "step_00000004; to resume: " in line


def test_a_run_outside_of_the_main_thread_needs_no_signals(fit):
    with ThreadPoolExecutor(1) as pool:
        assert series(pool.submit(fit, "--steps 2").result(), "train_loss").keys() == {1, 2}


def test_sigterm_at_the_time_limit_cuts_no_save_short_that_sigusr1_or_sighup_began(stop):
    stop, said = stop
    for name in ("HUP", "HUP", "USR1", "USR1", "TERM"):
        assert stop.requeue == (len(said) > 2)
        signal.raise_signal(signal.Signals[f"SIG{name}"])
    assert [line[:7] for line in said] == ["SIGHUP:"] * 2 + ["SIGUSR1"] * 2 + ["SIGTERM"]
    assert said[0].endswith("and saving")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_hangup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignal([].append)
    handler = signal.getsignal(signal.SIGHUP)
    stop.restore()
    signal.signal(signal.SIGHUP, before)
    assert handler == signal.SIG_IGN


def test_interrupt_is_heard_before_training_though_the_shell_had_it_ignored(capfd):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit), shown_in_one_line():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "interrupted\n"


def test_dropout_is_at_work(fit, unbroken):
    """Dropout changes the losses, so that the tests of equal runs also test its random numbers."""
    assert unbroken()[1] != outcome(fit(STEPS, "--model.dropout 0"))[1]


def test_evaluation_that_a_crash_lost_is_made_up_for(fit, unbroken, monkeypatch):
    def cut_short(_, record):
        if record["step"] == 8 and "val_loss" in record:
            raise Crash

    with monkeypatch.context() as patch:
        before_each(patch, MetricsLog, "write", cut_short)
        with pytest.raises(Crash):
            fit(STEPS)
    assert outcome(fit(STEPS, "--resume auto")) == unbroken()


def test_metrics_are_appended_to(fit, tmp_path, monkeypatch):
    """A resumed run appends to metrics.jsonl, without damaged lines and repeated steps."""
    at_step(monkeypatch, 7, crash)
    with pytest.raises(Crash):
        fit(STEPS, "--track tensorboard")
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = read_records(metrics)
    assert before[-1]["step"] == 7
    with metrics.open("ab") as file:
        file.write(b'[1]\n7\n{"train_loss": 1}\n{"step": 2, "tokens": 9, "val_loss": "\xff"}\n')
        file.write(b'{"step": 4, "tokens": 9, "val_loss": null}\n{"step": 3, "val_loss": 1.0}\n')
        file.write(b'{"step": 3, "tokens": 9, "train_loss": "1"}\n{"step": 8, "tr')
    (tmp_path / "run" / "manifest.json").write_text("[1]")
    time.sleep(1 - time.time() % 1)  # TensorBoard sorts event files by the second in their names
    run = fit("--resume auto --track tensorboard", STEPS)
    after = read_records(metrics)
    assert [r for r in after if r["step"] <= 4] == [r for r in before if r["step"] <= 4]
    assert [r["step"] for r in after if "train_loss" in r] == list(range(1, 13))
    assert [r["step"] for r in after if "val_loss" in r] == [0, 4, 8, 12]
    shown = EventAccumulator(str(run)).Reload().Scalars("loss/train")
    assert [event.step for event in shown] == list(range(1, 13))


def test_older_checkpoint_sets_the_newer_ones_aside(fit, unbroken):
    run = fit(STEPS)
    folder = run / "checkpoints"
    fit(STEPS, f"--resume {folder / 'step_00000004'} --steps 8")
    assert {path.name for path in folder.iterdir()} == {"step_00000004", "step_00000008", "best"}
    fit(STEPS, f"--resume {folder / 'step_00000004'}")
    assert outcome(run) == (whole := unbroken())
    first, second = run / "abandoned_1", run / "abandoned_2"
    assert outcome(first) == whole
    assert max(r["step"] for r in outcome(second)[0]) == 8
    assert configure(["--resume", str(second)]).steps == 8  # it is a run that could go on
    load(second)


def test_another_run_dir_forks(fit, tmp_path):
    run = fit(STEPS)

    def content():
        files = (path for path in run.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = content()
    source = run / "checkpoints" / "step_00000004"
    fork = fit(STEPS, f"--resume {source} --run-dir {tmp_path / 'fork'}")
    assert content() == before
    records, weights = outcome(fork)
    assert weights == outcome(run)[1]
    assert [r for r in records if r["step"] > 4] == [r for r in outcome(run)[0] if r["step"] > 4]


def test_auto_with_nothing_there_starts_fresh(fit, unbroken):
    assert outcome(fit(STEPS, "--resume auto")) == unbroken()


def test_auto_without_run_dir_finds_the_newest_run_of_the_recipe(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = tiny("--steps 4")
    where = argv.index("--run-dir")
    del argv[where : where + 2]
    for name in ("baby-20200101-000000", "baby-20300101-000000", "shakespeare-cpu-20400101-000000"):
        Trainer(configure([*argv, "--run-dir", f"runs/{name}"])).fit()
    Path("runs/baby-20350101-000000").mkdir()  # stopped before its first checkpoint
    assert configure([*argv, "--resume", "auto"]).run_dir == Path("runs/baby-20300101-000000")
    # the clock went back: the newest start counts, not the newest name
    Trainer(configure([*argv, "--run-dir", "runs/baby-20200101-000000", "--resume", "auto"])).fit()
    assert configure([*argv, "--resume", "auto"]).run_dir == Path("runs/baby-20200101-000000")


@pytest.mark.parametrize("named", [True, False], ids=["run-dir", "newest"])
def test_auto_goes_on_from_python(tiny, tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    argv = tiny("--steps 4", "" if named else "--run-dir runs/baby-20300101-000000")
    Trainer(first := configure(argv)).fit()
    config = replace(first, run_dir=first.run_dir if named else None, resume="auto", steps=6)
    assert resolve(config).resumed.step == 4
    trainer = Trainer(config)
    assert trainer.run.step == 4
    trainer.fit()
    assert set(series(first.run_dir, "train_loss")) == set(range(1, 7))


def test_a_batch_of_another_size_is_counted_in_tokens_and_epochs(tiny, monkeypatch):
    """An epoch has 40 samples: 2 batches of 8 and 2 of 16, the last half used."""
    at_step(monkeypatch, 2, terminate)
    Trainer(config := replace(configure(tiny()), epochs=1.0)).fit()
    run = config.run_dir
    Trainer(configure(["--resume", str(run), "--train.batch-tokens", "256"])).fit()
    assert series(run, "tokens") == {0: 0, 1: 128, 2: 256, 3: 512, 4: 768}
    assert series(run, "epoch")[4] == 1.2


def test_best_is_chosen_by_losses_of_the_same_text(fit, monkeypatch):
    """The last evaluation scores more text than the others, and may have a lower loss by that."""
    losses = {(4, 16): 2.5, (8, 16): 2.75, (8, 0): 2.25, (12, 16): 2.6, (12, 0): 2.1}
    monkeypatch.setattr(
        Run, "evaluate",
        lambda self, _, tokens, *rest: [(losses.get((self.step, tokens), 3.0), tokens or 72)],
    )  # fmt: skip
    for steps in (8, 12):  # the second one reads the losses of the first from its log
        run = fit(f"--steps {steps} --data.eval-tokens 16 --resume auto")
        assert series(run, "val_loss")[steps] == losses[steps, 0]
        assert checkpoint.load(run / "checkpoints" / "best").step == 4


def test_other_text_is_read_from_its_start(fit, text, capfd):
    fit(STEPS, "--steps 6")
    text.write_text(text.read_text() + "and so on, for another while.")
    fit(STEPS, "--resume auto")
    assert "warning: the data changed since " in capfd.readouterr().out


@pytest.mark.cpu
def test_best_is_the_same_after_a_resume(fit, monkeypatch, tmp_path):
    """`best` is the checkpoint with the lowest validation loss, also after a resume.

    At this learning rate the held-out loss rises above that of the untrained model.
    """
    flags = f"{STEPS} --optim.kind adamw --optim.lr 3 --optim.schedule constant --eval-every 2"
    flags += " --optim.grad-clip 0"
    whole = fit(flags, f"--run-dir {tmp_path / 'whole'}")
    at_step(monkeypatch, 5, terminate)
    fit(flags)
    run = fit(flags, "--resume auto")
    losses = {r["step"]: r["val_loss"] for r in outcome(run)[0] if "val_loss" in r and r["step"]}
    best = min(losses, key=losses.__getitem__)
    said = "choose flags with which the best checkpoint comes after the resume, and not last"
    assert 5 < best < 12, said
    for path in (whole, run):
        assert checkpoint.load(path / "checkpoints" / "best").step == best


# --- one process at a time ------------------------------------------------------------------------


def test_run_in_use_is_resumed_by_no_second_process_but_may_be_sampled_from(fit, tiny):
    run = fit("--steps 4")
    before = (run / "metrics.jsonl").read_bytes()
    first = Trainer(configure(tiny("--resume auto --steps 8")))
    used = "is in use: another process is training in this folder"
    with pytest.raises(UserError, match=rf"{used}: .* ends, or stop it$"):
        Trainer(configure(tiny(f"--resume {run / 'checkpoints' / 'step_00000004'}")))
    with pytest.raises(UserError, match=rf"{used}: .* or pass another --run-dir$"):
        Trainer(configure(tiny()))
    with pytest.raises(UserError, match=used):  # of a run that has no directory yet, say
        RunLock(run)
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
    ids=["moved", "removed", "unlocked"],
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


# --- real processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT, signal.SIGUSR1]
)
def test_signal_saves_exits_and_prints_a_command_that_goes_on(tiny, tmp_path, sent):
    """A stop signal saves the run and prints a resume command that works in a shell.

    The space in the folder's name must survive being copied there.
    """
    flags = "--model.dropout 0.2 --eval-every 0 --log-every 5"
    run = tmp_path / f"a{' ' * (sent is signal.SIGINT)}run"
    # so many steps that the signal always comes before the last
    argv = [*tiny(flags, "--steps 5000"), "--run-dir", str(run)]
    process = warm().start([str(ROOT / "train.py"), *argv])
    read_until(process, r"^step +20/")
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75 if sent is signal.SIGUSR1 else 0, "")
    # it may be the first line after the one that was waited for
    match = re.search(r"(?:^|\n)stopped after step (\d+), saved in .*\nto resume: (.*)\n$", out)
    assert match, out
    step, command = int(match[1]), shlex.split(match[2])
    assert command[:2] == [sys.executable, str(ROOT / "train.py")]
    [saved] = checkpoint.steps_on_disk(run / "checkpoints")
    assert (checkpoint.load(saved).step, saved.name) == (step, f"step_{step:08d}")
    done = warm().run(*command[1:], "--steps", step + 5, "--optim.schedule", "constant")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\ndone after step {step + 5}: {run}\n" in done.stdout
    assert read_records(run / "metrics.jsonl")[-1]["step"] == step + 5


def test_a_terminal_that_is_closed_ends_a_run_saved(tiny, tmp_path):
    """The system sends SIGHUP, and writing to the terminal then fails."""
    argv = [sys.executable, str(ROOT / "train.py"), *tiny("--steps 100000 --eval-every 0")]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` has ignored
        os.execv(sys.executable, argv)
    while not re.search(rb"/100000  loss \d", os.read(terminal, 4096)):
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    assert checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
