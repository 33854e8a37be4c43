"""Weights shared out among ranks by FSDP2: losses, weights and checkpoints of one process."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from fastgpt.checkpoint import checkpoint
from fastgpt.parallel.fsdp import gathered
from tests.runs import ROOT, finish, read_until, series, torchrun, torchrun_in_turn

TRAIN = str(ROOT / "train.py")


# of which the second rank's part of the vocabulary is padding only
PACKED = (
    " --model.num-heads 4 --model.num-kv-heads 2 --model.activation swiglu --model.qk-norm weighted"
    " --model.vocab-multiple 512 --train.z-loss 0.01 --model.softcap 15"
)


@pytest.mark.parametrize(
    ("more", "ranks"),
    [pytest.param("", 2, marks=pytest.mark.slow, id="plain"), pytest.param(PACKED, 4, id="packed")],
)
def test_a_run_goes_on_with_another_kind(more, ranks, fit, tiny, tmp_path):
    """Steps 1 to 4 on one rank, 5 and 6 on several with other kinds, 7 and 8 on one again.

    The checkpoint of step 4 is damaged in a file that the second rank verifies.
    """
    flags = f"--optim.kind adamw --optim.schedule constant {more}"
    whole = fit(flags, f"--run-dir {tmp_path / 'whole'}")
    saved = fit(flags, "--steps 4 --save-every 3") / "checkpoints"
    with (saved / "step_00000004" / "state.pt").open("r+b") as file:
        file.write(b"damage")
    kinds = "--steps 5 --parallel.kind fsdp", "--steps 6 --parallel.kind fsdp --parallel.tp 2"
    runs = [tiny(flags, "--resume auto", kind) for kind in kinds]
    out = finish(torchrun_in_turn(ranks, tmp_path / "jobs", runs))
    assert out.count("is damaged: state.pt has sha256") == 1
    run = fit(flags, "--resume auto --parallel.tp 1")
    assert [path.name for path in checkpoint.steps_on_disk(saved)] == [
        "step_00000005", "step_00000006", "step_00000008",
    ]  # fmt: skip
    for name in ("train_loss", "grad_norm"):
        assert series(run, name) == pytest.approx(series(whole, name), rel=1e-4)


@pytest.mark.parametrize(
    "kind", ["--parallel.kind fsdp", pytest.param("--parallel.cp 2", marks=pytest.mark.slow)]
)
def test_sigterm_to_one_rank_saves_where_ranks_meet_in_each_forward(kind, tiny, tmp_path):
    flags = "--steps 3000 --eval-every 0 --log-every 5 --train.micro-batch 1"
    process = torchrun(2, TRAIN, *tiny(flags, kind), forks=True)
    read_until(process, r"^step +20/")
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[1]), signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "Warning" not in err
    [saved] = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    step = checkpoint.load(saved).step
    assert f"stopped after step {step}, saved" in out


def test_weights_gathered_in_bf16_lose_little(tiny, tmp_path):
    """Losses, relative: within 1 % of those with fp32 gathers, and not equal to them."""
    flags = "--parallel.kind fsdp --optim.kind adamw --train.precision bf16 --parallel.dtype"
    kinds = ("fp32", "bf16")
    runs = [tiny(flags, kind, f"--run-dir {tmp_path / kind}") for kind in kinds]
    finish(torchrun_in_turn(2, tmp_path / "jobs", runs))
    losses = [series(tmp_path / kind, "val_loss") for kind in kinds]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]


def test_what_a_thread_writes_is_a_copy():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)))
        step = torch.tensor(1.0)
        kept = [gathered(x, weight) for x in (weight, step)]
        weight.mul_(2)
        step.add_(1)
    finally:
        dist.destroy_process_group()
    assert [x.tolist() for x in kept] == [[1.0] * 3, 1.0]
