"""Training itself: the loss falls, and a run's record of itself is true."""

import hashlib
import json
import math
import subprocess
from itertools import pairwise
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from fastgpt.checkpoint.checkpoint import Saver
from fastgpt.cli import configure
from fastgpt.data.loader import IGNORED, eval_batches
from fastgpt.device import device
from fastgpt.logs.metrics import read_records
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from fastgpt.parallel import signals
from fastgpt.train.trainer import Trainer
from tests.processes import ROOT
from tests.runs import before_each, series


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loss_falls_and_bf16_rounds_but_stays_close(fit, tmp_path, kind):
    losses = []
    for precision in ("fp32", "bf16"):
        flags = f"--train.precision {precision} --run-dir {tmp_path / precision}"
        run = fit(f"--optim.kind {kind} --steps 40 --optim.lr 1e-2", flags)
        train, val = series(run, "train_loss"), series(run, "val_loss")
        assert [train[1], val[0]] == pytest.approx(2 * [math.log(256)], abs=0.15)
        # the letters of the text alone, whatever their order, have an entropy of 2.7 nats
        assert max(train[40], val[40]) < 2
        losses.append([train[step] for step in range(1, 9)])
    full, rounded = losses
    assert full != rounded
    assert full == pytest.approx(rounded, abs=0.02)


def test_evaluations_and_samples_leave_no_trace_in_training(fit, tmp_path):
    """With dropout, a random number drawn or a mode left behind by a save would show, too."""
    often, never = (
        fit(f"--model.dropout 0.2 --eval-every {every} --run-dir {tmp_path / every}")
        for every in ("2", "0")
    )
    assert series(often, "train_loss") == series(never, "train_loss")


@pytest.mark.parametrize("skipping", [0, 3])
def test_steps_between_logs_do_not_wait_for_the_device(tiny, monkeypatch, skipping):
    """Reading a number out of a tensor syncs the device; only a log line may."""
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
                reads.append(func)
            return func(*args, **(kwargs or {}))

    for name in ("tolist", "cpu"):
        before_each(monkeypatch, torch.Tensor, name, lambda x, *_, **__: reads.append(x))
    # ranks agree on stopping through a tensor that never leaves the host
    monkeypatch.setattr(signals.StopSignal, "agreed", lambda *_: False)
    monkeypatch.setattr(Saver, "start", lambda *_: None)
    flags = "--steps 12 --log-every 4 --eval-every 0 --save-every 0 --optim.kind muon"
    flags += f" --train.skip-nonfinite {skipping}"
    trainer = Trainer(configure(tiny(flags, "--train.sample-tokens 0 --train.micro-batch 4")))
    at_log = []
    monkeypatch.setattr(trainer.display, "step", lambda *_: at_log.append(len(reads)))
    with Reads():
        trainer.fit()
    between = [after - before for before, after in pairwise(at_log)]
    assert between == [1, 1, 1]


def test_z_loss_reaches_the_training_loss_alone(fit, tmp_path):
    runs = [fit(f"--steps 1 --train.z-loss {z} --run-dir {tmp_path / z}") for z in ("0", "0.01")]
    vals, losses = ([series(run, f"{kind}_loss") for run in runs] for kind in ("val", "train"))
    assert vals[0][0] == vals[1][0]
    assert losses[1][1] - losses[0][1] == pytest.approx(0.01 * math.log(256) ** 2, rel=0.03)


@pytest.mark.cpu
def test_metrics_samples_and_files_are_the_promised_ones(fit):
    run = fit("--log-every 2 --train.sample-tokens 20")
    records = read_records(run / "metrics.jsonl")
    keys = "train_loss tok_per_s epoch data_wait mfu lr grad_norm"
    train = {"step", "tokens", "time", "muon_lr", *keys.split()}
    val = {"step", "tokens", "time", "val_loss", "val_bits_per_byte", "val_tokens"}
    kinds = [(0, val), *((s, train) for s in (1, 2, 4)), (4, val), (6, train), (8, train), (8, val)]
    assert [(r["step"], set(r)) for r in records] == kinds
    assert all(r["tokens"] == 128 * r["step"] for r in records)
    parts = (run / "samples.txt").read_text().split("=== step ")[1:]
    assert [part.split(" ===\n")[0] for part in parts] == ["4", "8"]
    assert all(part.split(" ===\n")[1].startswith("dog sat on") for part in parts)
    expected = "config.json manifest.json metrics.jsonl checkpoints samples.txt loss.png .lock"
    assert {path.name for path in run.iterdir()} == set(expected.split())
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"step_00000004", "step_00000008", "best"}


def test_first_val_loss_is_of_the_untrained_model_over_every_held_out_token(tiny):
    trainer = Trainer(configure(tiny("--data.eval-tokens 0")))
    val = trainer.run.plan.data.corpora[0].val
    batches = eval_batches(val, context=16, micro_batch=1, rank=0, world_size=1, max_tokens=0)
    model = trainer.run.model
    total = sum(model(x, y).item() * int((y != IGNORED).sum()) for x, y in batches)
    trainer.fit()
    first = read_records(trainer.run_dir / "metrics.jsonl")[0]
    assert first["val_tokens"] == len(val) - 1
    assert first["val_loss"] == pytest.approx(total / (len(val) - 1), rel=1e-6)
    assert first["val_bits_per_byte"] == pytest.approx(first["val_loss"] / math.log(2))


def test_bits_per_byte_count_bytes_and_not_characters(fit, text):
    text.write_text("grün, öd, süß: " * 60, encoding="utf-8")
    run = fit("--data.tokenizer chars --steps 1")
    held_out = text.read_text(encoding="utf-8")[int(900 * 0.9) :]
    factor = len(held_out) / len(held_out.encode()) / math.log(2)
    last = read_records(run / "metrics.jsonl")[-1]
    assert last["val_bits_per_byte"] == pytest.approx(last["val_loss"] * factor)


def test_rates_norm_and_throughput_are_of_training_alone(fit, monkeypatch):
    """By the clock of this test a step lasts 0.1 s, an evaluation and a save longer."""
    clock = mock.Mock(now=0.0)
    clock.perf_counter = clock.monotonic = lambda: clock.now

    def forward(model, *_, **__):
        clock.now += 0.1 if model.training else 0.3

    def save(*_, **__):
        clock.now += 0.5

    monkeypatch.setattr("fastgpt.train.recorder.time", clock)
    before_each(monkeypatch, GPT, "forward", forward)
    before_each(monkeypatch, Saver, "save", save)
    monkeypatch.setattr(device, "measured_peak", lambda *_: 1e9)
    flags = "--steps 6 --log-every 2 --eval-every 4 --save-every 1 --train.sample-tokens 1"
    run = fit(flags, "--optim.warmup-steps 12")
    records = [r for r in read_records(run / "metrics.jsonl") if "tok_per_s" in r]
    assert [r["step"] for r in records] == [1, 2, 4, 6]
    for r in records:
        assert r["lr"] == pytest.approx(4e-3 * r["step"] / 12)
        assert r["muon_lr"] == pytest.approx(0.02 * r["step"] / 12)
        assert r["grad_norm"] > 1  # before clipping
        assert r["tok_per_s"] == 1280  # 128 tokens in 0.1 s
        # 1 block: 12 C^2 weights; head: C x 300; attention: 12 H D (T + 1) / 2
        flops = 6 * (12 * 32**2 + 32 * 300) + 12 * 32 * 17 / 2
        assert r["mfu"] == pytest.approx(r["tok_per_s"] * flops / 1e9, abs=1e-4)


def test_the_manifest_says_what_ran(fit, text, monkeypatch):
    monkeypatch.setattr(device, "measured_peak", lambda *_: 1e9)
    run = fit()
    manifest = json.loads((run / "manifest.json").read_text())
    data = manifest["data"]
    assert data["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert data["train_tokens"] + data["val_tokens"] == text.stat().st_size
    assert manifest["versions"]["torch"] == torch.__version__
    assert (manifest["precision"], manifest["compile"], manifest["ranks"]) == ("fp32", False, 1)
    assert set(manifest["ops"]) == {*tables.OPS}
    assert "auto" not in manifest["ops"].values()
    assert manifest["peak_flops"] == 1e9
    weights = load_file(run / "checkpoints" / "step_00000008" / "model.safetensors")
    assert manifest["parameters"] == sum(weight.numel() for weight in weights.values())
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True)
    if not head.returncode:  # a checkout
        assert manifest["commit"].removesuffix("-dirty") == head.stdout.strip()


@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        ("--save-every 3", [4, 6, 8]),
        ("--eval-every 0", [8]),
        ("--save-every 1 --train.keep-checkpoints 2", [7, 8]),
    ],
)
def test_checkpoints_are_of_the_steps_asked_for(fit, flags, saved):
    folder = fit(flags, "--train.sample-tokens 0") / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == [f"step_{n:08d}" for n in saved]
