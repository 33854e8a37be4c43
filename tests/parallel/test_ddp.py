"""Ranks that average gradients: losses and weights of one process, and signals to one or all."""

import json
import os
import re
import signal
import time
import warnings
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fastgpt import cli
from fastgpt.checkpoint import checkpoint
from fastgpt.config.config import ParallelConfig
from fastgpt.errors import UserError
from fastgpt.logs.metrics import read_records
from fastgpt.parallel import distributed
from fastgpt.parallel.parallelize import replicate
from fastgpt.train import trainer
from tests.processes import ROOT, Job, read_until, torchrun
from tests.runs import assert_same_up_to_rounding

ENDLESS = "--steps 100000 --eval-every 0 --log-every 5 --train.micro-batch 1"


def count_syncs(argv):
    """Trains; returns how many numbers each sync of this rank had."""
    syncs = []

    def hook(group, bucket):
        syncs.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    run = trainer.Trainer(cli.configure(argv))
    run.run.ddp.register_comm_hook(None, hook)
    run.fit()
    return syncs


def test_two_ranks_give_what_one_gives_and_sync_once_a_step(ranks, fit, tiny, tmp_path):
    """Compares 2 ranks x 2 micro-steps x 2 sequences with 1 x 2 x 4 and 1 x 4 x 2, in fp32."""
    flags = "--train.micro-batch 2 --optim.kind adamw --data.eval-tokens 0"
    syncs = ranks(count_syncs, tiny(flags, f"--run-dir {tmp_path / 'two'}"))
    for size in (4, 2):
        one = fit(flags, f"--train.micro-batch {size} --run-dir {tmp_path / f'one-{size}'}")
        assert_same_up_to_rounding(tmp_path / "two", one)
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["ranks"] == 2
    # one bucket holds this model: 8 steps of 2 micro-steps are 8 syncs of every weight
    weights = load_file(one / "checkpoints" / "step_00000008" / "model.safetensors")
    padding = 44 * 32
    assert syncs == [[sum(x.numel() for x in weights.values()) + padding] * 8] * 2


def exchange_gradients(dtype):
    distributed.start("cpu")
    with warnings.catch_warnings(action="error"):
        replica = replicate(linear := nn.Linear(64, 64), ParallelConfig(dtype=dtype))
    replica(torch.randn(4, 64)).square().sum().backward()
    return linear.weight.grad.tolist()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bf16_gradients_are_exchanged_where_asked_for(ranks, dtype):
    one, other = map(torch.tensor, ranks(exchange_gradients, dtype))
    assert torch.equal(one, other)
    assert torch.equal(one, one.bfloat16().float()) is (dtype == "bf16")


def refuse(argv, more):
    """Returns the error of a run for which rank 1 has more flags."""
    with pytest.raises(UserError) as error:
        trainer.Trainer(cli.configure([*argv, *more.split() * int(os.environ["RANK"])]))
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optim.lr 0.5", "--optim.lr is 0.5 on rank 1, and 0.004 on rank 0"),
        ("--run-dir {}/other", "--resume is None on rank 1, and step_00000002 on rank 0"),
    ],
)
def test_other_settings_or_another_checkpoint_on_a_rank_are_refused(
    ranks, fit, tiny, tmp_path, flags, said
):
    if "run-dir" in flags:  # a disk that the ranks do not share
        fit("--steps 2")
    argv = tiny("--resume auto --train.micro-batch 4")
    errors = ranks(refuse, argv, flags.format(tmp_path))
    assert errors == [f"{said}: expected the same on all ranks"] * 2


def test_sigterm_to_all_of_torchrun_saves_once_and_goes_on(fit, tiny, tmp_path):
    process = torchrun(2, str(ROOT / "train.py"), *tiny(ENDLESS))
    read_until(process, r"^step +20/")
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert f"-m torch.distributed.run --nproc_per_node=2 {ROOT}/train.py --resume /" in out
    [step] = map(int, re.findall(r"^stopped after step (\d+), ", out, re.MULTILINE))
    [saved] = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    assert checkpoint.load(saved).step == step
    run = fit(ENDLESS, f"--steps {step + 2} --resume auto")
    assert read_records(run / "metrics.jsonl")[-1]["step"] == step + 2


def test_sigusr1_to_one_rank_ends_all_with_the_status_for_the_queue(tiny, tmp_path):
    with Job(2, cli.main, tiny(ENDLESS)) as job:
        job.wait_for(r"^step +20/")
        os.kill(job.ranks()[1], signal.SIGUSR1)
        status, out, err = job.end()
    assert status == 1, "torchrun's own"
    assert re.search(r"exitcode +: 75 ", err), err
    assert "stopped by SIGUSR1 and saved: exit status 75" in err
    [saved] = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    assert f"stopped after step {checkpoint.load(saved).step}, saved in {saved}" in out


def train_or_hang(argv, hangs):
    """Trains; if it `hangs`, rank 1 does so at step 20, and so does rank 0, which waits for it."""
    seed = trainer.seed_dropout

    def seed_or_hang(run):
        if hangs and run.step == 20 and run.plan.world.rank == 1:
            time.sleep(60)
        seed(run)

    with mock.patch.object(trainer, "seed_dropout", seed_or_hang):
        cli.main(argv)


@pytest.mark.parametrize(
    ("sent", "size", "hangs"),
    [(signal.SIGKILL, 2, False), (signal.SIGKILL, 2, True), (signal.SIGUSR1, 1, False)],
)
def test_ranks_end_with_their_launcher(tiny, tmp_path, sent, size, hangs):
    """Ranks save and end soon after torchrun, and those that cannot save end without."""
    with Job(size, train_or_hang, tiny(ENDLESS), hangs) as job:
        job.wait_for(r"^step +20/")
        os.kill(job.pid, sent)
        _, out, err = job.end(40)
    assert err.count(f"error: torchrun (process {job.pid}) has ended: saving, and ending") == 1
    assert bool(re.search("^stopped after step ", out, re.MULTILINE)) is not hangs
    assert len(checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")) == (not hangs)
