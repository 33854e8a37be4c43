"""A run on two machines, which are network namespaces, loses one of them and goes on."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, finish, torchrun
from tests.runs import series

MACHINES = {f"fastgpt{os.getpid()}{side}": f"10.213.7.{side}" for side in (1, 2)}


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def kill_all(name):
    for pid in ip("netns", "pids", name).split():
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def machines():
    """Makes two namespaces that are connected; skips the test where that is not allowed."""
    one, other = MACHINES
    try:
        for name in MACHINES:
            ip("netns", "add", name)
        ip("-n", one, "link", "add", "eth", "type", "veth", "peer", "eth", "netns", other)
        for name, host in MACHINES.items():
            ip("-n", name, "address", "add", f"{host}/24", "dev", "eth")
            for device in ("lo", "eth"):
                ip("-n", name, "link", "set", device, "up")
        yield one, other
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    finally:
        for name in MACHINES:
            if Path("/run/netns", name).exists():
                kill_all(name)
                ip("netns", "delete", name)


@pytest.mark.slow
def test_a_run_that_loses_a_machine_goes_on_from_its_last_checkpoint(machines, fit, tiny, tmp_path):
    flags = "--optim.kind adamw --train.micro-batch 1 --steps 60 --eval-every 0 --save-every 2"
    flags += " --train.keep-checkpoints 99"
    whole = fit(flags, f"--run-dir {tmp_path / 'whole'}")
    nodes, endpoint = [], f"{MACHINES[machines[0]]}:29400"
    for name, host in MACHINES.items():
        elastic = (
            f"--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id=1"
            f" --local-addr={host} --max-restarts=1 --rdzv-conf=keep_alive_interval=1,"
            f"keep_alive_max_attempt=2,last_call_timeout=2,is_host={name == machines[0]}"
        )
        argv = [*elastic.split(), str(ROOT / "train.py"), *tiny(flags, "--resume auto")]
        inside = ("ip", "netns", "exec", name)
        nodes.append(torchrun(2, *argv, before=inside, GLOO_SOCKET_IFNAME="eth"))
    until, run = time.monotonic() + 60, tmp_path / "run"
    while not (run / "checkpoints" / "step_00000008").exists():
        assert time.monotonic() < until
        time.sleep(0.001)
    kill_all(machines[1])
    finish(nodes[0])
    manifest = json.loads((run / "manifest.json").read_text())
    assert [manifest["ranks"], *(x["ranks"] for x in manifest["resumes"])] == [4, 2]
    for name in ("train_loss", "val_loss"):
        assert series(run, name) == pytest.approx(series(whole, name), rel=1e-5)
