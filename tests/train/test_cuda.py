"""Training on a GPU: `make parity` runs these tests; without CUDA each is skipped."""

import json
from dataclasses import replace

import pytest
import torch

from fastgpt.autotune import choose
from fastgpt.autotune.trials import TRIALS, Sizes
from fastgpt.cli import configure
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.logs.metrics import read_records
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer, train
from tests.runs import finish, series, torchrun

pytestmark = pytest.mark.gpu

SMALL = ModelConfig(num_layers=2, num_heads=4, dim=64, context=64, vocab_size=257)


def on_cuda(tiny, *flags: str) -> list[str]:
    return tiny("--train.device cuda --train.precision bf16", *flags)


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    """Resets Dynamo, as all cases compile the same code object and would pass its limit."""
    torch.compiler.reset()


def loss_and_gradients(model, x, y, precision):
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, y)
    loss.backward()
    return loss.detach().cpu(), [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "position": "rotary"},
        {"num_kv_heads": 2, "qk_norm": True, "window": 9, "tied": False, "softcap": 15.0},
        {"norm": "post-layernorm", "activation": "gelu_erf", "position": "sinusoidal"},
    ],
    ids=["gpt2", "modern", "grouped-window", "post-norm"],
)
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("asked", [OpsConfig(), OpsConfig(kernels="triton")], ids=["auto", "ours"])
def test_gpt_on_cuda_is_the_gpt_on_the_cpu(asked, options, precision, bound):
    config = replace(SMALL, **options)
    truth = GPT(config, tables.select(OpsConfig(attention="torch"), "cpu"))
    model = GPT(config, tables.select(asked, "cuda")).cuda()
    model.load_state_dict(truth.state_dict())
    x, y = torch.randint(0, 257, (2, 3, 64))
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    got, got_gradients = loss_and_gradients(compiled, x.cuda(), y.cuda(), precision)
    want, want_gradients = loss_and_gradients(truth, x, y, "fp32")
    torch.testing.assert_close(got, want, rtol=bound, atol=0)
    for d, true in zip(got_gradients, want_gradients, strict=True):
        assert (d - true).norm() <= bound * max(true.norm(), 1e-3)


def test_a_step_waits_for_nothing(tiny):
    run = build(resolve(configure(on_cuda(tiny, "--train.compile off"))))
    for _ in range(2):
        train(run, run.step + 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(run, run.step + 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.loader.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_trains_compiled_and_resumes(tiny, tmp_path, kind, precision):
    flags = f"--optim.kind {kind} --train.precision {precision} --model.dropout 0.1 --save-every 4"
    Trainer(configure(on_cuda(tiny, flags))).fit()
    losses = series(tmp_path / "run", "train_loss")
    assert losses[8] < losses[1]
    again = tmp_path / "again"
    at = tmp_path / "run" / "checkpoints" / "step_00000004"
    Trainer(configure(["--resume", str(at), "--run-dir", str(again)])).fit()
    for step, loss in series(again, "train_loss").items():
        # sums over atomics are not in one order on a GPU
        assert loss == pytest.approx(losses[step], rel=1e-3)


@pytest.mark.slow
def test_gpt2_runs_compiled_in_bf16_under_torchrun(tmp_path):
    command = (
        "train.py gpt2-124m --steps 10 --log-every 5 --eval-every 0 --train.batch-tokens 16384"
        " --train.micro-batch 16 --data.final-eval-tokens 16384"
    )
    finish(torchrun(1, *command.split(), "--run-dir", str(tmp_path / "run")), timeout=500)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["precision"], manifest["compile"]) == ("bf16", True)
    last = read_records(tmp_path / "run" / "metrics.jsonl")[-2]
    assert last["tok_per_s"] > 0
    assert last["mfu"] > 0
    assert last["peak_memory_gib"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_our_kernels_pass_the_trial_that_auto_asks_for(precision, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path))
    model = ModelConfig(num_layers=1, vocab_size=50_257, position="rotary")
    said = []
    sizes = Sizes(model, 4, precision, True)
    _, results = choose.choose(OpsConfig(), sizes, "cuda", said.append)
    assert results.keys() == TRIALS.keys()
    for result in results.values():
        assert result["complaints"] == []
        assert len(result["milliseconds"]) >= 2
    [line] = said
    assert "once" in line
