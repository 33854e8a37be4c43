"""Training on a GPU: `make parity` runs these tests; without CUDA each is skipped."""

import json
from dataclasses import replace

import pytest
import torch

from fastgpt.cli import configure
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.logs.metrics import read_records
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer, train
from tests.models import OPTIONS
from tests.processes import finish, torchrun
from tests.runs import series

pytestmark = pytest.mark.gpu

SMALL = ModelConfig(num_layers=2, num_heads=4, dim=64, context=64, vocab_size=257)


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    """Resets Dynamo, as all cases compile the same code object and would pass its limit."""
    torch.compiler.reset()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "post-layernorm", "activation": "gelu_erf", "position": "sinusoidal"},
        OPTIONS["modern"],
    ],
)
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_gpt_on_cuda_is_the_gpt_on_the_cpu(kernels, options, precision, bound):
    config = replace(SMALL, **options)
    truth = GPT(config, tables.select(OpsConfig(attention="torch"), "cpu"))
    model = GPT(config, tables.select(OpsConfig(kernels=kernels), "cuda")).cuda()
    model.load_state_dict(truth.state_dict())
    x, y = torch.randint(0, 257, (2, 3, 64))
    (want := truth(x, y)).backward()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
        got = compiled(x.cuda(), y.cuda())
    got.backward()
    torch.testing.assert_close(got.cpu(), want, rtol=bound, atol=0)
    for ours, true in zip(model.parameters(), truth.parameters(), strict=True):
        error = (ours.grad.cpu() - true.grad).norm()
        assert error <= bound * max(true.grad.norm(), 1e-3)


def test_a_step_waits_for_nothing(tiny):
    flags = tiny("--train.device cuda --train.precision bf16 --train.compile off")
    run = build(resolve(configure(flags)))
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
def test_trains_compiled_and_resumes(fit, tmp_path, kind, precision):
    flags = f"--train.device cuda --optim.kind {kind} --train.precision {precision}"
    run = fit(flags, "--model.dropout 0.1 --save-every 4")
    losses = series(run, "train_loss")
    assert losses[8] < losses[1]
    again = str(tmp_path / "again")
    at = str(run / "checkpoints" / "step_00000004")
    Trainer(configure(["--resume", at, "--run-dir", again])).fit()
    for step, loss in series(tmp_path / "again", "train_loss").items():
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
    assert len(manifest["trials"]) == 4
    for trial in manifest["trials"].values():
        assert (trial["complaints"], len(trial["milliseconds"])) == ([], 2)
    last = read_records(tmp_path / "run" / "metrics.jsonl")[-2]
    assert min(last["tok_per_s"], last["mfu"], last["peak_memory_gib"]) > 0
