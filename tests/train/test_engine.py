"""The engine's steps where memory runs out or numbers are not finite, simulated on a CPU."""

import math

import pytest
import torch

from fastgpt.cli import parse
from fastgpt.device import device
from fastgpt.errors import UserError
from fastgpt.train.engine import Engine
from fastgpt.train.trainer import Trainer
from tests.runs import torchrun


@pytest.mark.cpu
def test_peak_memory_is_that_of_training_alone(tiny, monkeypatch):
    """A rehearsal that failed has taken more than the run will; the peak begins after the last."""
    events = []

    def rehearse(_, size):
        events.append(size)
        if size > 4:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(device, "reset_peak_memory", lambda _: events.append("reset"))
    monkeypatch.setattr("fastgpt.train.micro_batch.REHEARSED", {"cpu"})
    monkeypatch.setattr(Engine, "_rehearse", rehearse)
    Engine(parse(tiny("--train.micro-batch 8"))).loader.close()
    assert events == [8, 4, "reset"]


@pytest.mark.cpu
def test_memory_that_runs_out_later_or_at_once_is_one_clear_error(tiny, monkeypatch):
    def run_out(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("fastgpt.train.micro_batch.REHEARSED", {"cpu"})
    trainer = Trainer(parse(tiny("--train.micro-batch 8")))
    trainer.engine.loss = run_out
    with pytest.raises(UserError, match=r"^step \d: no GPU memory left with micro-batches of 8"):
        trainer.fit()
    monkeypatch.setattr(Engine, "_rehearse", run_out)
    with pytest.raises(UserError, match=r"^no GPU memory left for a step with a micro-batch of 1"):
        Engine(parse(tiny()))


RUN_OUT = """
import os, torch, train
from fastgpt.train.engine import Engine

step = Engine.train_step

def run_out(engine, stop=None):
    if engine.step == 2 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    step(engine, stop)

Engine.train_step = run_out
train.main()
"""


def test_one_rank_without_memory_ends_all(tiny, tmp_path):
    (tmp_path / "run_out.py").write_text(RUN_OUT)
    process = torchrun(2, str(tmp_path / "run_out.py"), *tiny(), forks=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "[rank 1] error: step 2: no GPU memory left with micro-batches of 4: pass a " in err


def test_an_overflow_of_fp16_is_not_reported_for_a_later_failure(tiny):
    engine = Engine(parse(tiny("--optim.kind adamw --steps 20")))
    engine.optimizers.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = dict(engine.model.named_parameters())
    for name, steps in {"wte.weight": [1], "h.0.mlp.c_fc.weight": range(4, 9)}.items():

        def spoilt(gradient, steps=steps):
            return gradient * (math.inf if engine.step + 1 in steps else 1)

        weights[name].register_hook(spoilt)
    for _ in range(3):
        engine.train_step()
        engine.finite_loss()
    assert engine.optimizers.scaler.get_scale() == 2.0  # of the overflow
    for _ in range(2):
        engine.train_step()
    said = r"^step 4: not finite; at step 5 .*: the gradient of h.0.mlp.c_fc.weight$"
    with pytest.raises(UserError, match=said):
        engine.finite_loss()
    engine.loader.close()
