"""A run that was cut short, in any way, goes on with the same bits as one that was not."""

import errno
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from fastgpt.checkpoint import checkpoint, tensors
from fastgpt.cli import configure
from fastgpt.convert.source import load
from fastgpt.errors import UserError
from fastgpt.logs.metrics import MetricsLog, read_records
from fastgpt.parallel.distributed import World
from fastgpt.run.directory import new_run_dir
from fastgpt.train.build import Run
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer
from tests.checkpoint.conftest import STEPS
from tests.data.sets import contents
from tests.runs import Crash, at_step, before_each, crash, outcome, series, terminate


@pytest.mark.parametrize(
    ("cut", "kind", "sampling"),
    [
        (crash, "muon", "epoch"),
        (terminate, "adamw", "epoch"),
        (terminate, "muon", "random-windows"),
        (crash, "adamw", "random-windows"),
    ],
)
def test_resumed_run_equals_the_unbroken_one(fit, unbroken, monkeypatch, sampling, kind, cut):
    """Step 7 is in the second epoch, between two checkpoints, and has 2 micro-steps."""
    flags = f"--optim.kind {kind} --data.sampling {sampling}"
    at_step(monkeypatch, 7, cut)
    with pytest.raises(Crash) if cut is crash else nullcontext():
        run = fit(STEPS, flags, "--resume auto")  # nothing is there yet: it starts afresh
        assert checkpoint.steps_on_disk(run / "checkpoints")[-1].name == "step_00000007"
    assert outcome(fit(STEPS, flags, "--resume auto")) == unbroken(flags)


def test_flags_of_a_resumed_run_reach_the_optimizers(fit):
    run = fit("--steps 2")
    flags = f"--resume {run} --steps 3 --optim.weight-decay 0.3 --optim.beta2 0.5 --optim.beta1 0.5"
    trainer = Trainer(configure(flags.split()))
    adamw, muon = (it.param_groups for it in trainer.run.optimizers.all)
    assert [(group["weight_decay"], group["betas"][1]) for group in adamw] == [(0.3, 0.5), (0, 0.5)]
    assert [(group["weight_decay"], group["momentum"]) for group in muon] == [(0.3, 0.75)]
    trainer.fit()


def test_killed_before_its_first_checkpoint_it_starts_again_and_keeps_its_log(
    fit, unbroken, tmp_path, monkeypatch, capfd
):
    run, logs = tmp_path / "run", []
    for _ in range(2):
        at_step(monkeypatch, 2, crash)
        with pytest.raises(Crash):
            fit(STEPS, "--track tensorboard --resume auto")
        logs.append((run / "metrics.jsonl").read_bytes())
    Trainer(configure(["--resume", str(run)])).fit()
    assert f"its earlier logs are kept in {run}/abandoned_2\n" in capfd.readouterr().out
    assert outcome(run) == unbroken()
    for folder, log in zip(("abandoned_1", "abandoned_2"), logs):
        assert (run / folder / "metrics.jsonl").read_bytes() == log
        assert len(list((run / folder).glob("events.out.*"))) == 1
    assert len(list(run.glob("events.out.*"))) == 1


def test_evaluation_that_a_crash_lost_is_made_up_for(fit, unbroken, tmp_path, monkeypatch):
    def cut_short(_, record):
        if record["step"] == 8 and "val_loss" in record:
            raise Crash

    with monkeypatch.context() as patch:
        before_each(patch, MetricsLog, "write", cut_short)
        with pytest.raises(Crash):
            fit(STEPS)
    (tmp_path / "run" / "manifest.json").write_text("[1]")
    assert outcome(fit(STEPS, "--resume auto")) == unbroken()


def test_resumes_are_kept_in_the_manifest(fit, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["first"])
    run = fit("--steps 4")
    first = json.loads((run / "manifest.json").read_text())
    assert (first["command"], first["resumed_from_step"]) == (["first"], None)
    monkeypatch.setattr(sys, "argv", ["second"])
    fit("--steps 6 --optim.lr 0.1 --resume auto")
    settings = (run / "config.json").read_bytes()
    Trainer(configure(["--resume", str(run), "--optim.muon-lr", "9"])).fit()
    assert (run / "config.json").read_bytes() == settings  # no step was taken with the others
    manifest = json.loads((run / "manifest.json").read_text())
    starts = [(x["command"], x["resumed_from_step"]) for x in manifest.pop("resumes")]
    assert starts == [(["second"], 4), (["second"], 6)]
    assert manifest == first


def test_damaged_lines_of_the_log_and_steps_to_come_are_dropped(tmp_path):
    good = [{"step": step, "tokens": 9, "train_loss": 1.5} for step in (1, 4, 5)]
    good.append({"step": 4, "tokens": 9, "val_loss": 1.0})
    damaged = (
        b'[1]\n7\n{"train_loss": 1}\n{"step": 2, "tokens": 9, "val_loss": "\xff"}\n'
        b'{"step": 4, "tokens": 9, "val_loss": null}\n{"step": 3, "val_loss": 1.0}\n'
        b'{"step": 3, "tokens": 9, "train_loss": "1"}\n{"step": 3, "tr'
    )
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in good) + damaged)
    log = MetricsLog(tmp_path, 4, "title")
    assert log.records == read_records(path) == [record for record in good if record["step"] < 5]


def test_older_checkpoint_forks_or_sets_the_newer_ones_aside(fit, unbroken, tmp_path):
    run, (whole, whole_weights) = fit(STEPS), unbroken()
    folder, before = run / "checkpoints", contents(run)
    older = f"--resume {folder / 'step_00000004'}"
    records, weights = outcome(fit(STEPS, older, f"--run-dir {tmp_path / 'fork'}"))
    assert contents(run) == before
    assert weights == whole_weights
    assert [r for r in records if r["step"] > 4] == [r for r in whole if r["step"] > 4]
    fit(STEPS, older, "--steps 8")
    assert {path.name for path in folder.iterdir()} == {"step_00000004", "step_00000008", "best"}
    fit(STEPS, older)
    assert outcome(run) == outcome(run / "abandoned_1") == (whole, whole_weights)
    second = run / "abandoned_2"
    assert max(r["step"] for r in outcome(second)[0]) == 8
    assert configure(["--resume", str(second)]).steps == 8  # it is a run that could go on
    load(second)


def test_auto_without_run_dir_finds_the_newest_run_of_the_recipe(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = tiny("--steps 1 --eval-every 0")
    where = argv.index("--run-dir")
    del argv[where : where + 2]
    for name in ("baby-20200101-000000", "baby-20300101-000000", "shakespeare-cpu-20400101-000000"):
        Trainer(configure([*argv, "--run-dir", f"runs/{name}"])).fit()
    Path("runs/baby-20350101-000000").mkdir()  # stopped before its first checkpoint
    assert configure([*argv, "--resume", "auto"]).run_dir == Path("runs/baby-20300101-000000")
    # the clock went back: the newest start counts, not the newest name
    Trainer(configure([*argv, "--run-dir", "runs/baby-20200101-000000", "--resume", "auto"])).fit()
    newest = Path("runs/baby-20200101-000000")
    assert configure([*argv, "--resume", "auto"]).run_dir == newest
    config = replace(configure(argv), resume="auto", steps=3)  # as from Python
    assert resolve(config).resumed.step == 1
    Trainer(config).fit()
    assert set(series(newest, "train_loss")) == {1, 2, 3}
    monkeypatch.setattr("time.strftime", lambda _: "20200101-000000")
    assert new_run_dir("other") == Path("runs/other-20200101-000000")
    assert new_run_dir("baby") == Path(f"{newest}-2")


def test_a_batch_of_another_size_is_counted_in_tokens_and_epochs(tiny, monkeypatch):
    """An epoch has 40 samples: 2 batches of 8 and 2 of 16, the last half used."""
    at_step(monkeypatch, 2, terminate)
    Trainer(config := replace(configure(tiny()), epochs=1.0)).fit()
    run = config.run_dir
    Trainer(configure(["--resume", str(run), "--train.batch-tokens", "256"])).fit()
    assert series(run, "tokens") == {0: 0, 1: 128, 2: 256, 3: 512, 4: 768}
    assert series(run, "epoch")[4] == 1.2


def test_other_text_is_read_from_its_start(fit, text, capfd):
    fit(STEPS, "--steps 6")
    text.write_text(text.read_text() + "and so on, for another while.")
    epochs = series(fit(STEPS, "--resume auto"), "epoch")
    assert "warning: the data changed since " in capfd.readouterr().out
    assert epochs[6] == 1.2
    assert epochs[7] == pytest.approx(8 / 42, abs=1e-4)


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


def test_ranks_load_the_same_checkpoint_or_none_and_share_the_checksums(fit, monkeypatch):
    saved = fit("--steps 2 --eval-every 0") / "checkpoints" / "step_00000002"
    names = list(json.loads((saved / "checkpoint.json").read_text())["sha256"])
    rank = names.index("tokenizer.json") % 2
    (saved / "tokenizer.json").write_text("damage")
    with pytest.raises(UserError, match=r"is damaged: tokenizer\.json"):
        checkpoint.load(saved, world=World(local_rank=rank, local_size=2))
    alone = World(local_rank=1 - rank, local_size=2)
    checkpoint.load(saved, world=alone)
    for told in (("step_00000009", None), ("step_00000002", "step_00000009 is on a bad disk")):
        monkeypatch.setattr(World, "all_gather_object", lambda _, own, told=told: [own, told])
        with pytest.raises(UserError, match="step_00000009"):
            checkpoint.load(saved, world=alone)


def test_resumed_runs_have_the_same_bits_on_the_same_ranks(tiny, tmp_path, ranks):
    flags = "--parallel.kind fsdp --optim.schedule constant --model.dropout 0.1"
    places = "--model.dropout-places embedding residual feed_forward"
    for name, more in {"fsdp": "", "tp": f"--parallel.tp 2 {places}"}.items():
        run, whole = tmp_path / name, tmp_path / f"{name}-whole"
        broken = f"{flags} {more} --run-dir {run}"
        ranks.train(
            tiny(flags, more, f"--run-dir {whole}"),
            tiny(broken, "--steps 4"),
            tiny(broken, "--resume auto"),
        )
        assert outcome(run) == outcome(whole)
        saved = checkpoint.steps_on_disk(run / "checkpoints")
        assert [path.name for path in saved] == ["step_00000004", "step_00000008"]
        assert {*checkpoint.WEIGHT_FILES} <= {path.name for path in saved[1].iterdir()}


def train_on_a_full_disk(argv):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(tensors, "write", side_effect=error),
        pytest.raises(UserError, match=r"no space left .* step 4 was not saved"),
    ):
        Trainer(configure(argv)).fit()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_leave_where_one_cannot_save(tiny, tmp_path, kind, ranks):
    ranks(train_on_a_full_disk, tiny(f"--parallel.kind {kind} --steps 100000"))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert max(series(tmp_path / "run", "val_loss")) == 4
