"""Weights shared out among ranks by FSDP2, whose layers TP cuts: checkpoints, signals, dropout."""

import signal
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from fastgpt.checkpoint import checkpoint
from fastgpt.cli import configure
from fastgpt.data.loader import Loader
from fastgpt.faults.failure import peer_monitor
from fastgpt.parallel import distributed, parallelize
from fastgpt.parallel.fsdp import gathered
from fastgpt.train.trainer import Trainer
from tests.processes import Ranks
from tests.runs import series

FSDP, TP = "--parallel.kind fsdp", "--parallel.kind fsdp --parallel.tp 2"
# the second rank's part of the vocabulary is padding only
PACKED = (
    "--model.num-heads 4 --model.num-kv-heads 2 --model.activation swiglu --model.qk-norm weighted"
    " --model.vocab-multiple 512 --train.z-loss 0.01 --model.softcap 15"
)


@pytest.mark.parametrize(("more", "size"), [("", 2), (PACKED, 4)])
def test_a_run_goes_on_with_another_kind(more, size, fit, tiny, tmp_path):
    """Steps 1 to 4 on one rank, 5 and 6 on several with other kinds, 7 and 8 on one again.

    The checkpoint of step 4 is damaged in a file that the second rank verifies.
    """
    flags = f"--optim.kind adamw --optim.schedule constant {more}"
    whole = fit(flags, f"--run-dir {tmp_path / 'whole'}")
    saved = fit(flags, "--steps 4 --save-every 3") / "checkpoints"
    with (saved / "step_00000004" / "state.pt").open("r+b") as file:
        file.write(b"damage")
    kinds = f"--steps 5 {FSDP}", f"--steps 6 {TP}"
    with Ranks(size) as several:
        out = several.train(*(tiny(flags, "--resume auto", kind) for kind in kinds))
    assert out.count("is damaged: state.pt has sha256") == 1
    run = fit(flags, "--resume auto --parallel.tp 1")
    assert [path.name for path in checkpoint.steps_on_disk(saved)] == [
        "step_00000005", "step_00000006", "step_00000008",
    ]  # fmt: skip
    for name in ("train_loss", "grad_norm"):
        assert series(run, name) == pytest.approx(series(whole, name), rel=1e-4)


def train_until_sigterm(argv):
    """Trains; rank 1 gets SIGTERM between the forwards of step 3."""
    batches, take = [], Loader.next

    def take_and_signal(self):
        batches.append(1)
        if len(batches) == 2 * self.accumulation + 2 and trainer.world.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return take(self)

    try:
        with mock.patch.object(Loader, "next", take_and_signal):
            trainer = Trainer(configure(argv))
            trainer.fit()
    finally:
        peer_monitor.stopping = False


@pytest.mark.parametrize("kind", [FSDP, "--parallel.cp 2"])
def test_sigterm_to_one_rank_saves_where_ranks_meet_in_each_forward(kind, ranks, tiny, tmp_path):
    ranks(train_until_sigterm, tiny("--eval-every 0 --train.micro-batch 1", kind))
    [saved] = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    assert checkpoint.load(saved).step == 2


def test_weights_gathered_in_bf16_lose_little(ranks, tiny, tmp_path):
    """Losses, relative: within 1 % of those with fp32 gathers, and not equal to them."""
    flags = f"{FSDP} --optim.kind adamw --train.precision bf16 --parallel.dtype"
    kinds = ("fp32", "bf16")
    ranks.train(*(tiny(flags, kind, f"--run-dir {tmp_path / kind}") for kind in kinds))
    losses = [series(tmp_path / kind, "val_loss") for kind in kinds]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert losses[0] != losses[1]


def gather_and_change():
    distributed.start("cpu")
    weight = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (2,)))
    step = torch.tensor(1.0)
    kept = [gathered(x, weight) for x in (weight, step)]
    weight.mul_(2)
    step.add_(1)
    return [x if x is None else x.tolist() for x in kept]


def test_what_a_thread_writes_is_a_copy(ranks):
    assert ranks(gather_and_change)[0] == [[1.0] * 3, 1.0]


def train_with_dropout(argv):
    """Returns where this rank built the model, and (name, replicated, equal) of each weight."""
    devices, build_model = [], parallelize.build_model

    def build_and_tell(*args, **options):
        model = build_model(*args, **options)
        devices.append(model.wte.weight.device.type)
        return model

    with mock.patch.object(parallelize, "build_model", build_and_tell):
        trainer = Trainer(configure(argv))
        trainer.fit()
    parts = []
    for name, weight in trainer.run.model.named_parameters():
        one, other = trainer.world.gather(weight.detach().to_local().reshape(1, -1))
        parts.append((name, weight.placements[-1].is_replicate(), torch.equal(one, other)))
    return devices, parts


def test_ranks_draw_the_same_masks_for_what_they_share(ranks, tiny):
    flags = f"{TP} --train.micro-batch 2 --model.dropout 0.2"
    flags += " --model.dropout-places embedding residual feed_forward"
    (main, parts), (other, _) = ranks(train_with_dropout, tiny(flags))
    assert (main, other) == (["meta", "cpu"], ["meta"]), "whole on one rank"
    assert {replicated for _, replicated, _ in parts} == {True, False}
    assert [name for name, replicated, equal in parts if replicated is not equal] == []
