"""Ranks under torchrun: losses and weights of one process, and one sync a step."""

import json
import os
import re
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fastgpt.checkpoint import checkpoint
from fastgpt.config.config import ParallelConfig
from fastgpt.logs.metrics import read_records
from fastgpt.parallel.parallelize import replicate
from tests.runs import ROOT, assert_same_up_to_rounding, finish, read_until, torchrun

SHORT = "--steps 2 --data.eval-tokens 4096 --data.final-eval-tokens 4096"
# train.py, but each rank says in the end how often it synced.
COUNTED = """
import json, os, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from fastgpt.parallel import parallelize

syncs = []

def hook(group, bucket):
    syncs.append(bucket.buffer().numel())
    return allreduce_hook(group, bucket)

class Counted(DistributedDataParallel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, hook)

parallelize.DistributedDataParallel = Counted
train.main()
with open(os.environ["SEEN"] + os.environ["RANK"], "w") as file:
    json.dump({"syncs": len(syncs), "numbers": sum(syncs)}, file)
"""


def test_two_ranks_give_what_one_gives(fit, tiny, tmp_path):
    """Two ranks reach the losses and weights of one process, and sync once per step.

    Compares 2 ranks x 2 micro-steps x 2 sequences with 1 x 2 x 4 and 1 x 4 x 2, in fp32.
    """
    (tmp_path / "counted.py").write_text(COUNTED)
    flags = "--train.micro-batch 2 --optim.kind adamw --data.eval-tokens 0"
    argv = tiny(flags, f"--run-dir {tmp_path / 'two'}")
    process = torchrun(
        2, str(tmp_path / "counted.py"), *argv, forks=True, SEEN=str(tmp_path / "rank")
    )
    finish(process)
    for size in (4, 2):
        one = fit(flags, f"--train.micro-batch {size} --run-dir {tmp_path / f'one-{size}'}")
        assert_same_up_to_rounding(tmp_path / "two", one)
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["ranks"] == 2
    ranks = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    # one bucket holds this model: 8 steps of 2 micro-steps are 8 syncs of every weight
    weights = load_file(one / "checkpoints" / "step_00000008" / "model.safetensors")
    total = sum(weight.numel() for weight in weights.values()) + 44 * 32
    assert ranks == [{"syncs": 8, "numbers": 8 * total}] * 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bf16_gradients_are_exchanged_where_asked_for(dtype):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings(action="error"):
            replica = replicate(linear := nn.Linear(64, 64), ParallelConfig(dtype=dtype))
        replica(torch.randn(4, 64)).square().sum().backward()
    finally:
        dist.destroy_process_group()
    gradient = linear.weight.grad
    assert torch.equal(gradient, gradient.bfloat16().float()) is (dtype == "bf16")


def test_sigterm_to_all_of_torchrun_saves_once_and_goes_on(fit, tiny, tmp_path):
    flags = "--steps 3000 --eval-every 0 --log-every 5 --train.micro-batch 1"
    process = torchrun(2, str(ROOT / "train.py"), *tiny(flags))
    read_until(process, r"^step +20/")
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "FutureWarning" not in err
    stopped = [line for line in out.splitlines() if line.startswith("stopped after step ")]
    assert len(stopped) == 1, out
    assert f"-m torch.distributed.run --nproc_per_node=2 {ROOT}/train.py --resume /" in out
    step = int(stopped[0].split()[3].rstrip(","))
    [saved] = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    assert checkpoint.load(saved).step == step
    run = fit(flags, f"--steps {step + 2} --resume auto")
    assert read_records(run / "metrics.jsonl")[-1]["step"] == step + 2


def test_sigusr1_to_one_rank_ends_all_with_the_status_for_the_queue(tiny, tmp_path):
    script = "import os, train\nprint('pid', os.getpid(), flush=True)\ntrain.main()"
    (tmp_path / "told.py").write_text(script)
    flags = "--steps 100000 --eval-every 0 --log-every 5 --train.micro-batch 1"
    process = torchrun(2, str(tmp_path / "told.py"), *tiny(flags))
    pid = int(process.stdout.readline().split()[1])
    read_until(process, r"^step +20/")
    os.kill(pid, signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, "torchrun's own"
    assert re.findall(r"exitcode *: (-?\d+) ", err) == ["75", "75"], err
    assert "stopped by SIGUSR1 and saved: exit status 75" in err
    [saved] = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    assert f"stopped after step {checkpoint.load(saved).step}, saved in {saved}" in out


@pytest.mark.parametrize(
    ("sent", "ranks", "hangs"),
    [
        pytest.param(signal.SIGKILL, 2, False, marks=pytest.mark.slow),
        (signal.SIGKILL, 2, True),
        (signal.SIGUSR1, 1, False),
    ],
)
def test_ranks_end_with_their_launcher(tiny, tmp_path, sent, ranks, hangs):
    """Ranks save and end soon after torchrun, and those that cannot save end without."""
    script = "import train\n"
    if hangs:  # rank 1, and so does rank 0, which waits for it
        script += (
            "import os, time; from fastgpt.train import trainer; seed = trainer.seed_dropout\n"
        )
        script += "rest = lambda run: run.step == 20 and os.environ['RANK'] == '1' and"
        script += " time.sleep(60)\ntrainer.seed_dropout = lambda run: rest(run) or seed(run)\n"
    (tmp_path / "hangs.py").write_text(f"{script}train.main()")
    flags = "--steps 3000 --eval-every 0 --log-every 5 --train.micro-batch 1"
    process = torchrun(ranks, str(tmp_path / "hangs.py"), *tiny(flags))
    read_until(process, r"^step +20/")
    process.send_signal(sent)
    out, err = process.communicate(timeout=40)  # the ranks have the other ends of both pipes
    assert err.count(f"error: torchrun (process {process.pid}) has ended: saving, and ending") == 1
    assert bool(re.search("^stopped after step ", out, re.MULTILINE)) is not hangs
    assert len(checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")) == (not hangs)


OTHER = """
import os, sys
import train
sys.argv[1:] = sys.argv[2:] + sys.argv[1].split() * (os.environ["RANK"] == "1")
train.main()
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optim.lr 0.5", "--optim.lr is 0.5 on rank 1, and 0.004 on rank 0"),
        ("--steps 6", "--steps is 6 on rank 1, and 8 on rank 0"),
        ("--run-dir other", "--resume is None on rank 1, and step_00000002 on rank 0"),
    ],
)
def test_ranks_with_other_settings_or_another_checkpoint_end_at_the_start(
    fit, tiny, tmp_path, flags, said
):
    if "run-dir" in flags:  # a disk that the ranks do not share
        fit("--steps 2")
    (tmp_path / "other.py").write_text(OTHER)
    argv = tiny("--resume auto --train.micro-batch 4")
    process = torchrun(2, str(tmp_path / "other.py"), flags, *argv, cwd=tmp_path, forks=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert f"{said}: expected the same on all ranks" in err


@pytest.mark.slow
@pytest.mark.every_change
def test_headline_command(tmp_path):
    """The README's `torchrun` command trains with 8 ranks on the built-in corpus."""
    if torch.cuda.is_available() and torch.cuda.device_count() < 8:
        pytest.skip("8 ranks need 8 GPUs where there is one")
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    out = finish(torchrun(8, "train.py", *SHORT.split(), cwd=tmp_path, forks=True))
    [run] = (tmp_path / "runs").iterdir()
    assert f"\ndone after step 2: {run}\n" in out
    assert [r["step"] for r in read_records(run / "metrics.jsonl")] == [0, 1, 2, 2]
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["ranks"], manifest["data"]["name"]) == (8, "builtin")
    [saved] = checkpoint.steps_on_disk(run / "checkpoints")
    assert saved.name == "step_00000002"
    assert out.count("step      0  epoch 0.00  val loss") == 1, "only one rank speaks"


@pytest.mark.slow
@pytest.mark.every_change
def test_batch_that_ranks_cannot_share(tiny):
    process = torchrun(2, str(ROOT / "train.py"), *tiny("--train.batch-tokens 48"))
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "error: --train.batch-tokens is 48" in err
    # where torchrun's report of many lines ends
    assert "traceback : error: --train.batch-tokens is 48" in err.splitlines()[-2]
    assert "2 data-parallel ranks" in err
