"""The engine's steps where memory runs out or numbers are not finite, simulated on a CPU."""

import json
import math

import pytest
import torch

from fastgpt import ops, rehearsal
from fastgpt.cli import parse
from fastgpt.distributed import World
from fastgpt.engine import Engine
from fastgpt.errors import UserError
from fastgpt.kernels import attention_ref
from fastgpt.trainer import Trainer
from tests.trainer.runs import series

SMALL = "--ops.attention torch --model.dropout 0.1"


@pytest.fixture
def memory(monkeypatch):
    """Limits attention in training to some sequences at once, as a GPU's memory does."""
    limit = {"sequences": 8, "calls": math.inf}

    def attention(q, *rest, **options):
        limit["calls"] -= 1
        if torch.is_grad_enabled() and (q.shape[0] > limit["sequences"] or limit["calls"] < 0):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return attention_ref(q, *rest, **options)

    monkeypatch.setitem(ops.ATTENTION, "torch", attention)
    monkeypatch.setattr(rehearsal, "REHEARSED", {"cpu"})
    monkeypatch.setattr("fastgpt.engine.REHEARSED", {"cpu"})
    return limit


def test_a_micro_batch_that_does_not_fit_is_halved(fit, memory, tmp_path, capfd):
    half = fit(SMALL, "--train.micro-batch 4 --run-dir", str(tmp_path / "half"))
    said = "--train.micro-batch is 8, for which the GPU's memory is too small: using 4, 2 at a time"
    assert said not in capfd.readouterr().out
    memory["sequences"] = 4
    whole = fit(SMALL, "--train.micro-batch 8 --run-dir", str(tmp_path / "whole"))
    assert capfd.readouterr().out.count(said) == 1
    for key in ("train_loss", "val_loss"):
        assert series(whole, key) == series(half, key)
    facts = [json.loads((run / "manifest.json").read_text()) for run in (half, whole)]
    assert [x["micro_batch"] for x in facts] == [4, 4]


def test_memory_that_runs_out_later_or_at_once_is_one_clear_error(tiny, memory):
    memory["calls"] = 6
    trainer = Trainer(parse(tiny(SMALL, "--train.micro-batch 8")))
    with pytest.raises(UserError, match=r"^step \d: no GPU memory left with micro-batches of 8"):
        trainer.fit()
    memory["sequences"] = 0
    with pytest.raises(UserError, match=r"^no GPU memory left for a step with a micro-batch of 1"):
        Engine(parse(tiny(SMALL)))


def test_all_ranks_use_what_fits_on_each():
    """Another rank has room for 3 of 12 sequences, this one for 9."""
    tried, said = [], []

    def runs(size: int) -> None:
        tried.append(size)
        if size > 9:
            raise torch.OutOfMemoryError

    class Ranks(World):
        def sum(self, x):
            return x + (tried[-1] > 3)

    assert rehearsal.fitting(12, 12, runs, Ranks(), said.append) == 3
    assert tried == [12, 6, 3]
    assert len(said) == 1


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
