"""Helpers that interrupt and compare runs."""

import hashlib
import re
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from fastgpt.checkpoint import checkpoint
from fastgpt.logs.metrics import read_records
from fastgpt.terminal import Display

# --- cut short ------------------------------------------------------------------------------------


class Crash(BaseException):
    """A power cut, which nothing in the trainer may catch to tidy up."""


def crash():
    raise Crash


def terminate():
    signal.raise_signal(signal.SIGTERM)


def at_step(monkeypatch, step, action):
    """Patches the trainer so that `action` runs once, after `step` has been logged."""
    show = Display.step

    def shown(self, record, *rest):
        show(self, record, *rest)
        if record["step"] == step:
            monkeypatch.setattr(Display, "step", show)
            action()

    monkeypatch.setattr(Display, "step", shown)


def before_each(monkeypatch, owner, name, action):
    """Makes each call of a function begin with `action`, which gets the same arguments."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        action(*args, **kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@contextmanager
def files_of_at_most(size):
    """Simulates a full disk: no file can grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def one_line_error(capfd, command, *args):
    """Returns the one line on stderr with which a command must fail."""
    with pytest.raises(SystemExit) as stopped:
        command(*args)
    error = capfd.readouterr().err
    assert stopped.value.code in (1, 2)  # 2: a wrong flag
    assert re.fullmatch(r"error: .*\n", error), error
    return error


# --- compared -------------------------------------------------------------------------------------


def series(run, key):
    """Returns the values of one key of metrics.jsonl as {step: value}."""
    return {r["step"]: r[key] for r in read_records(run / "metrics.jsonl") if key in r}


def octets(x):
    """Returns the bytes of a tensor."""
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def outcome(run):
    """Returns what two equal runs share: losses, norms and rates by step, and the last weights."""
    kept = ("step", "train_loss", "val_loss", "val_bits_per_byte", "lr", "grad_norm", "tokens")
    records = [
        {key: value for key, value in record.items() if key in kept}
        for record in read_records(run / "metrics.jsonl")
    ]
    weights = checkpoint.load(checkpoint.steps_on_disk(run / "checkpoints")[-1]).weights
    bits = hashlib.sha256()
    for name in sorted(weights):
        bits.update(octets(weights[name]))
    return records, bits.hexdigest()


def assert_same_up_to_rounding(run, expected):
    """Asserts equality up to the order of sums: as measured, losses agree to 3e-7."""
    for key, tolerance in (("train_loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-4)):
        assert series(run, key) == pytest.approx(series(expected, key), rel=tolerance)
    weights, wanted = (
        load_file(checkpoint.steps_on_disk(path / "checkpoints")[-1] / "model.safetensors")
        for path in (run, expected)
    )
    for name in [name for name in weights if name.endswith("c_attn.bias")]:
        # the keys' biases change no attention: AdamW makes steps of the rounding of their gradients
        weights[name], wanted[name] = (
            torch.stack(x[name].chunk(3))[[0, 2]] for x in (weights, wanted)
        )
    torch.testing.assert_close(weights, wanted, rtol=1e-3, atol=1e-5)
