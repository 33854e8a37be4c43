"""The run's steps where memory runs out or numbers are not finite, simulated on a CPU."""

import math

import pytest
import torch

from fastgpt.cli import configure
from fastgpt.device import device
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer, train


@pytest.mark.cpu
def test_peak_memory_is_that_of_training_alone(tiny, monkeypatch):
    """A probe that failed has taken more than the run will; the peak begins after the last."""
    events = []

    def probe(*parts):
        size = parts[-1]
        events.append(size)
        if size > 4:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "reset_peak_memory", lambda _: events.append("reset"))
    monkeypatch.setattr("fastgpt.train.build.PROBED", {"cpu"})
    monkeypatch.setattr("fastgpt.train.build.try_micro_steps", probe)
    build(resolve(configure(tiny("--train.micro-batch 8")))).loader.close()
    assert events == [8, 4, "reset"]


@pytest.mark.cpu
def test_memory_that_runs_out_later_or_at_once_is_one_clear_error(tiny, monkeypatch):
    def run_out(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("fastgpt.train.build.PROBED", {"cpu"})
    trainer = Trainer(configure(tiny("--train.micro-batch 8")))
    trainer.run.forward = run_out
    with pytest.raises(UserError, match=r"^step \d: no GPU memory left with micro-batches of 8"):
        trainer.fit()
    monkeypatch.setattr("fastgpt.train.build.try_micro_steps", run_out)
    with pytest.raises(UserError, match=r"^no GPU memory left for a step with a micro-batch of 1"):
        build(resolve(configure(tiny())))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_a_gpu_that_other_programs_fill_is_one_line(kind, capfd):
    with pytest.raises(SystemExit), shown_in_one_line():
        raise kind("CUDA error: out of memory. It tried. GPU 0 is full. You\nSearch for")
    assert "GPU 0 is full: end other programs on the GPU" in capfd.readouterr().err
    with pytest.raises(kind, match="a bug"), shown_in_one_line():
        raise kind("a bug")


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
