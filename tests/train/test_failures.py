"""The run's steps where memory runs out or numbers are not finite, simulated on a CPU."""

import math
from unittest import mock

import pytest
import torch

from fastgpt.cli import configure
from fastgpt.device import device
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer, train


@pytest.mark.cpu
def test_memory_that_runs_out_at_once_or_later(tiny, monkeypatch):
    """A probe that failed has taken more than the run will; the peak begins after the last."""
    events = []

    def probe(*parts):
        events.append(parts[-1])
        if parts[-1] > most:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "reset_peak_memory", lambda _: events.append("reset"))
    monkeypatch.setattr("fastgpt.train.build.PROBED", {"cpu"})
    monkeypatch.setattr("fastgpt.train.build.try_micro_steps", probe)
    most = 4
    trainer = Trainer(configure(tiny("--train.micro-batch 8")))
    assert events == [8, 4, "reset"]
    trainer.run.forward = mock.Mock(side_effect=torch.OutOfMemoryError)
    with pytest.raises(UserError, match=r"^step \d: no GPU memory left with micro-batches of 4"):
        trainer.fit()
    most = 0
    with pytest.raises(UserError, match=r"^no GPU memory left for a step with a micro-batch of 1"):
        build(resolve(configure(tiny())))


def test_a_gpu_that_other_programs_fill_is_one_line(capfd):
    for kind in (torch.OutOfMemoryError, RuntimeError):
        with pytest.raises(SystemExit), shown_in_one_line():
            raise kind("CUDA error: out of memory. GPU 0 is full. You\nSearch for")
    assert capfd.readouterr().err.count("\n") == 2
    with pytest.raises(RuntimeError, match="a bug"), shown_in_one_line():
        raise RuntimeError("a bug")


def test_an_overflow_of_fp16_is_not_reported_for_a_later_failure(tiny, monkeypatch):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: scaler)
    run = build(resolve(configure(tiny("--optim.kind adamw --steps 20"))))
    weights = dict(run.model.named_parameters())
    for name, steps in {"wte.weight": [1], "h.0.mlp.c_fc.weight": range(4, 9)}.items():

        def spoilt(gradient, steps=steps):
            return gradient * (math.inf if run.step + 1 in steps else 1)

        weights[name].register_hook(spoilt)
    for _ in range(3):
        train(run, run.step + 1)
        run.finite_loss()
    assert run.optimizers.scaler.get_scale() == 2.0  # of the overflow
    for _ in range(2):
        train(run, run.step + 1)
    said = r"^step 4: not finite; at step 5 .*: the gradient of h.0.mlp.c_fc.weight$"
    with pytest.raises(UserError, match=said):
        run.finite_loss()
    run.loader.close()
