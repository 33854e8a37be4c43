"""launch/slurm.sh with stand-ins for Slurm's commands, which note how they are called."""

import os
import signal
import subprocess
import time

import pytest

from tests.processes import ROOT

STANDINS = {
    "scontrol": "echo node1; echo node2",
    "scancel": 'kill -TERM "$(cat pid)"',
    "srun": '[ "$LONG" ] || exit 3; trap "exit 1" TERM; echo $$ >pid; while :; do sleep 0.1; done',
}
TRAIN = (
    "srun --kill-on-bad-exit=1 --export=ALL torchrun --nnodes=2 --nproc_per_node=4"
    " --rdzv-backend=c10d --rdzv-endpoint=node1:29400 --rdzv-id=7"
    " train.py baby --steps 9 --run-dir runs/slurm-7 --resume auto"
)
NODES, REQUEUE = "scontrol show hostnames node[1-2]", "scontrol requeue 7"


@pytest.mark.parametrize(
    ("long", "status", "calls"),
    [
        ("", 3, {NODES, TRAIN}),  # a job fails with its run
        ("yes", 0, {NODES, TRAIN, "scancel --signal=TERM 7.0", REQUEUE}),
    ],
)
def test_a_job_near_its_limit_saves_and_goes_back_into_the_queue(long, status, calls, tmp_path):
    for name, does in STANDINS.items():
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >>calls\n{does}\n')
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "7", "JOB_NODELIST": "node[1-2]", "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "4"}
    own = {f"SLURM_{name}": value for name, value in slurm.items()}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [ROOT / "launch" / "slurm.sh", "baby", "--steps", "9"], cwd=tmp_path,
        env={**os.environ, **own, "PATH": path, "LONG": long},
    )  # fmt: skip
    until = time.monotonic() + 20
    while long and not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1 if long else 0)
    assert process.wait(timeout=20) == status
    assert set((tmp_path / "calls").read_text().splitlines()) == calls
