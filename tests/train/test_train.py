"""Training itself: the loss falls, and a run's record of itself is true."""

import hashlib
import json
import math
import platform
import re
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode

import train
from fastgpt.checkpoint.checkpoint import Saver
from fastgpt.cli import configure
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.data.loader import IGNORED, eval_batches
from fastgpt.device import device
from fastgpt.logs.metrics import MetricsLog, plot_losses, read_records
from fastgpt.model.flops import flops_per_token
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from fastgpt.parallel import signals
from fastgpt.terminal import Display
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer
from tests.runs import ROOT, assert_shows_two_curves, before_each, series


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loss_falls(fit, kind, precision):
    run = fit(f"--optim.kind {kind} --train.precision {precision} --steps 40 --optim.lr 1e-2")
    train, val = series(run, "train_loss"), series(run, "val_loss")
    assert train[1] == pytest.approx(math.log(256), abs=0.15)
    assert val[0] == pytest.approx(math.log(256), abs=0.15)
    # the letters of the text alone, whatever their order, have an entropy of 2.7 nats
    assert train[40] < 2
    assert val[40] < 2


def test_bf16_rounds_and_stays_close(fit, tmp_path):
    """Losses in bf16 differ from those in fp32, but by less than 0.02.

    If bf16 silently were fp32, every other test would pass.
    """
    runs = [fit(f"--train.precision {p} --run-dir {tmp_path / p}") for p in ("fp32", "bf16")]
    full, rounded = (list(series(run, "train_loss").values()) for run in runs)
    assert full != rounded
    assert full == pytest.approx(rounded, abs=0.02)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_split_batches_give_the_same_losses(fit, tmp_path, kind):
    """Splitting a batch into micro-batches changes the losses by rounding only.

    The order of sums alone differs: 1e-5 on the losses of 8 steps, 1e-3 on the norms.
    """
    whole, split = (
        fit(f"--optim.kind {kind} --train.micro-batch {size} --run-dir {tmp_path / str(size)}")
        for size in (8, 3)  # 3 does not divide 8: 2 is taken
    )
    for key, tolerance in (("train_loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-3)):
        assert series(split, key) == pytest.approx(series(whole, key), rel=tolerance)


@pytest.mark.parametrize(("asked", "warned"), [(3, False), (4, True), (7, False)])
def test_a_batch_that_leaves_half_of_a_micro_batch_unused_is_worth_a_warning(
    fit, capfd, asked, warned
):
    """A micro-batch size of which the batch leaves half unused gets a warning.

    There are 14 sequences: micro-batches of 3 or 4 become ones of 2, those of 7 stay.
    """
    fit(f"--steps 1 --train.batch-tokens {14 * 16} --train.micro-batch {asked}")
    assert ("divide into micro-batches of 2 at most" in capfd.readouterr().out) == warned


def test_evaluations_and_saves_show_how_far_they_are(fit, monkeypatch):
    shown = []
    monkeypatch.setattr(Display, "doing", lambda _, what="": shown.append(what))
    fit("--steps 1 --train.micro-batch 2")
    evaluation = ["evaluating 1/3", "evaluating 2/3", "evaluating 3/3"]
    written = ["saving", ""]  # the end waits for the thread that writes
    assert shown == [*evaluation, "", "saving", *evaluation, "sampling", "", *written]


def test_evaluations_and_samples_leave_no_trace_in_training(fit, tmp_path):
    """Evaluations and samples do not change the training losses, even with dropout.

    With dropout, a random number drawn or a mode left behind by a save would show, too.
    """
    runs = [
        fit(f"--model.dropout 0.2 --eval-every {every} --run-dir {tmp_path / every}")
        for every in ("2", "0")
    ]
    often, never = (series(run, "train_loss") for run in runs)
    assert often == never


@pytest.mark.parametrize("skipping", [0, 3])
def test_steps_between_logs_do_not_wait_for_the_device(tiny, monkeypatch, skipping):
    """Steps between two log lines never wait for the device.

    Reading a number out of a tensor syncs the device; only a log line may.
    """
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


def test_z_loss_reaches_the_training_loss_alone(fit, tiny, tmp_path):
    flags = "--train.z-loss 0.01 --steps 1"
    plain, run = fit(f"--steps 1 --run-dir {tmp_path / 'plain'}"), fit(flags)
    assert series(run, "val_loss")[0] == series(plain, "val_loss")[0]
    live = build(resolve(configure(tiny("--steps 1"))))
    live.model.z_loss = 0.01
    loss = live.model(*live.loader.next())
    live.loader.close()
    assert series(run, "train_loss")[1] == pytest.approx(loss.item(), rel=1e-6)
    assert configure(["--resume", str(run)]).train.z_loss == 0.01
    config = json.loads((run / "config.json").read_text())
    del config["train"]["z_loss"]  # as before there was any
    (run / "config.json").write_text(json.dumps(config))
    assert configure(["--resume", str(run)]).train == configure(tiny()).train


# --- metrics --------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_metrics_have_the_promised_keys(fit):
    records = read_records(fit("--log-every 2") / "metrics.jsonl")
    keys = "train_loss tok_per_s epoch data_wait mfu lr grad_norm"
    train = {"step", "tokens", "time", "muon_lr", *keys.split()}
    val = {"step", "tokens", "time", "val_loss", "val_bits_per_byte", "val_tokens"}
    kinds = [(0, val), *((s, train) for s in (1, 2, 4)), (4, val), (6, train), (8, train), (8, val)]
    assert [(r["step"], set(r)) for r in records] == kinds
    assert all(r["tokens"] == 128 * r["step"] for r in records)


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


def test_schedule_and_clipping_reach_the_metrics(fit):
    run = fit("--optim.lr 1e-3 --optim.warmup-steps 4 --optim.schedule constant")
    rates = [r["lr"] for r in read_records(run / "metrics.jsonl") if "lr" in r]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, *[1e-3] * 5])
    assert all(norm > 1 for norm in series(run, "grad_norm").values())  # before clipping to 1


def test_throughput_is_of_training_alone(fit, monkeypatch):
    """Tokens per second and MFU leave out evaluations, samples and checkpoints.

    By the clock of this test a step lasts 0.1 s, a save 0.5 s.
    """
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
    records = [r for r in read_records(fit(flags) / "metrics.jsonl") if "tok_per_s" in r]
    assert [r["step"] for r in records] == [1, 2, 4, 6]
    for r in records:
        assert r["tok_per_s"] == 1280  # 128 tokens in 0.1 s
        # 1 block: 12 C^2 weights; head: C x 300; attention: 12 H D (T + 1) / 2
        flops = 6 * (12 * 32**2 + 32 * 300) + 12 * 32 * 17 / 2
        assert r["mfu"] == pytest.approx(r["tok_per_s"] * flops / 1e9, abs=1e-4)


# --- what a run says of itself --------------------------------------------------------------------


def test_tensorboard_holds_what_metrics_hold(fit):
    run = fit("--track tensorboard")
    board = EventAccumulator(str(run)).Reload()
    for tag in ("loss/val_bits_per_byte", "speed/tok_per_s", "speed/mfu", "optim/lr"):
        written = {event.step: event.value for event in board.Scalars(tag)}
        assert written == pytest.approx(series(run, tag.split("/")[1]), rel=1e-6)
    for kind in ("train", "val"):
        written = {event.step: event.value for event in board.Scalars(f"loss/{kind}")}
        assert written == pytest.approx(series(run, f"{kind}_loss"), rel=1e-6)


def test_manifest_says_what_ran(tiny, text):
    trainer = Trainer(configure(tiny("--steps 1")))
    trainer.fit()
    manifest = json.loads((trainer.run_dir / "manifest.json").read_text())
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"]["python"] == platform.python_version()
    assert (manifest["precision"], manifest["compile"], manifest["ranks"]) == ("fp32", False, 1)
    assert set(manifest["ops"]) == {*tables.OPS}
    assert "auto" not in manifest["ops"].values()
    assert "6N + causal attention" in manifest["mfu"]
    assert manifest["peak_flops"] > 1e8
    data = manifest["data"]
    assert data["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert data["train_tokens"] + data["val_tokens"] == text.stat().st_size
    weights = load_file(trainer.run_dir / "checkpoints/step_00000001/model.safetensors")
    assert manifest["parameters"] == sum(weight.numel() for weight in weights.values())
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True)
    if not head.returncode:  # a checkout
        assert manifest["commit"].removesuffix("-dirty") == head.stdout.strip()


def test_loss_png_shows_both_curves(fit, monkeypatch):
    monkeypatch.setattr("fastgpt.logs.metrics.plot_losses", plot_losses)
    assert_shows_two_curves(fit() / "loss.png")


def test_samples_continue_the_prompt(fit):
    run = fit("--train.sample-tokens 20")
    parts = (run / "samples.txt").read_text().split("=== step ")[1:]
    assert [part.split(" ===\n")[0] for part in parts] == ["4", "8"]
    assert all(part.split(" ===\n")[1].startswith("dog sat on") for part in parts)


# --- the run directory ----------------------------------------------------------------------------


def test_everything_is_there_and_nothing_else(fit):
    run = fit("--track tensorboard")
    names = {path.name for path in run.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    expected = "config.json manifest.json metrics.jsonl checkpoints samples.txt loss.png .lock"
    expected += " tensorboard.tracked"
    assert names - events == set(expected.split())
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"step_00000004", "step_00000008", "best"}


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


def test_saved_before_it_is_evaluated(fit, monkeypatch):
    """A checkpoint begins to be written before its step is evaluated."""
    events = []

    def saved(_, step, *__, **___):
        events.append(("saved", step))

    before_each(monkeypatch, Saver, "save", saved)

    def look(log, record):
        if "val_loss" in record and record["step"]:
            events.append(("evaluated", record["step"]))

    before_each(monkeypatch, MetricsLog, "write", look)
    fit()
    assert events == [(event, step) for step in (4, 8) for event in ("saved", "evaluated")]


def test_crash_at_the_start_of_a_resume_leaves_the_run_resumable(fit, monkeypatch):
    fit("--steps 4")
    write = Path.write_text

    def cut_short(self, content, *args, **kwargs):
        write(self, content[:10], *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "write_text", cut_short)
        fit("--resume auto")
    assert read_records(fit("--resume auto") / "metrics.jsonl")[-1]["step"] == 8


def test_name_is_the_recipe_and_the_time(tiny, tmp_path, monkeypatch):
    """A run's folder is named by recipe and time; in the same second the second one gets `-2`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20240102-030405")
    for _ in range(2):
        Trainer(configure(tiny("--steps 1 --run-dir None"))).fit()
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["baby-20240102-030405", "baby-20240102-030405-2"]


def test_a_run_tells_its_time_both_rates_and_a_warmup_that_it_does_not_end(fit, capfd):
    run = fit("--steps 14 --optim.warmup-steps 28 --log-every 2 --eval-every 0")
    out = capfd.readouterr().out
    told = re.findall(r"^step +(\d+)/14 .*  0:00:\d\d left$", out, re.M)
    assert told == ["2", "4", "6", "8", "10", "12"]
    assert "warning: --optim.warmup-steps is 28, but the run has 14 steps" in out
    assert series(run, "lr")[14] == 4e-3 * 14 / 28
    assert series(run, "muon_lr")[14] == pytest.approx(0.02 * 14 / 28)


def test_terminal_shows_the_run(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train.py", *tiny("--log-every 2")])
    monkeypatch.setattr(device, "measured_peak", lambda *_: 1e9)
    train.main()
    out, err = capfd.readouterr()
    lines = out.splitlines()
    heads = "recipe device model data training ops MFU run"
    assert [line.split("  ")[0] for line in lines[:8]] == heads.split()
    data = json.loads((tmp_path / "run" / "manifest.json").read_text())["data"]
    assert data["sha256"][:16] in lines[3]
    assert "655 training + 73 validation tokens (byte tokenizer)" in lines[3]
    assert "8 steps of 128 tokens each (8 sequences x 1 micro-step x 1 rank), Muon" in lines[4]
    shown = [line for line in lines if line.startswith("step")]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert len(shown) == len(records)
    for line, record in zip(shown, records):
        loss = record.get("train_loss", record.get("val_loss"))
        assert f"loss {loss:.4f}" in line
    assert "--- sample ---" in lines
    best = min(series(tmp_path / "run", "val_loss").values())
    end = [
        f"done after step 8: {tmp_path / 'run'}",
        f"it took S; best val loss {best:.4f} at step 8: {tmp_path / 'run'}/checkpoints/best",
        f"to sample from it: {sys.executable} -m fastgpt.sample {tmp_path / 'run'}",
        f"to train longer: {sys.executable} {ROOT / 'train.py'} --resume {tmp_path / 'run'}",
    ]
    assert [re.sub(r" 0:00:\d\d;", " S;", line).split(" --steps")[0] for line in lines[-4:]] == end
    assert err == ""
    assert "\x1b" not in out, "colours and bars are for terminals"


# --- FLOPs ----------------------------------------------------------------------------------------


def test_gpt2_124m_is_counted_by_hand():
    qkv, out, up, down = 768 * 2304, 768 * 768, 768 * 3072, 3072 * 768
    N = 12 * (qkv + out + up + down) + 50_304 * 768  # the head is padded to a multiple of 64
    assert N == 123_568_128
    # q k^T and weights x v: 2 FLOPs * 12 heads * 64 for each key, forward once and backward twice
    for_one_key = 3 * (2 + 2) * 12 * 64
    keys = sum(range(1, 1025)) / 1024  # the first token sees itself alone
    flops = flops_per_token(RECIPES["gpt2-124m"][1].model)
    assert flops == 6 * N + 12 * for_one_key * keys
    assert round(flops / 1e6) == 798


# One layer of width 64 in 4 heads over 8 tokens; each matrix of a token costs 6 FLOPs a weight.
CASES = {
    "plain": ({}, 4 * 64 * 64 + 2 * 64 * 256, 36 / 8),
    "grouped-heads": ({"num_kv_heads": 1}, 64 * (64 + 32) + 64 * 64 + 2 * 64 * 256, 36 / 8),
    "swiglu": ({"activation": "swiglu", "ffn_dim": 100}, 4 * 64 * 64 + 3 * 64 * 100, 36 / 8),
    "window": ({"window": 3}, 4 * 64 * 64 + 2 * 64 * 256, (1 + 2 + 6 * 3) / 8),
    "window-of-one": ({"window": 1}, 4 * 64 * 64 + 2 * 64 * 256, 1),
    "window-beyond-the-context": ({"window": 99}, 4 * 64 * 64 + 2 * 64 * 256, 36 / 8),
    "untied": ({"tied": False}, 4 * 64 * 64 + 2 * 64 * 256, 36 / 8),
}


@pytest.mark.parametrize(("options", "weights", "keys"), CASES.values(), ids=CASES)
def test_flops_follow_the_shapes(options, weights, keys):
    small = {"num_layers": 1, "num_heads": 4, "dim": 64, "context": 8, "vocab_size": 100}
    config = ModelConfig(**small, **options)
    head = 128 * 64
    assert flops_per_token(config) == 6 * (weights + head) + 12 * 64 * keys
