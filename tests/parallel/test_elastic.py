"""A run on two machines, which are network namespaces, loses one of them and goes on."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.runs import ROOT, finish, series, torchrun

NAMES = [f"fastgpt{os.getpid()}{side}" for side in "ab"]
HOSTS = ["10.213.7.1", "10.213.7.2"]


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def machines():
    """Makes two namespaces that are connected; skips the test where that is not allowed."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("-n", NAMES[0], "link", "add", "eth", "type", "veth", "peer", "eth", "netns", NAMES[1])
        for name, host in zip(NAMES, HOSTS):
            ip("-n", name, "address", "add", f"{host}/24", "dev", "eth")
            for device in ("lo", "eth"):
                ip("-n", name, "link", "set", device, "up")
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    finally:
        for name in NAMES:
            if Path("/run/netns", name).exists():
                kill_all(name)
                ip("netns", "delete", name)


def kill_all(name):
    for pid in ip("netns", "pids", name).split():
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_that_loses_a_machine_goes_on_from_its_last_checkpoint(machines, fit, tiny, tmp_path):
    flags = "--optim.kind adamw --train.micro-batch 1 --steps 60 --eval-every 0 --save-every 2"
    flags += " --train.keep-checkpoints 99"
    whole = fit(flags, f"--run-dir {tmp_path / 'whole'}")
    nodes = []
    for name, host in zip(NAMES, HOSTS):
        noticed = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=2"
        elastic = [
            "--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={HOSTS[0]}:29400",
            "--rdzv-id=1", f"--local-addr={host}", "--max-restarts=1",
            f"--rdzv-conf={noticed},is_host={host == HOSTS[0]}",
        ]  # fmt: skip
        argv, inside = tiny(flags, "--resume auto"), ("ip", "netns", "exec", name)
        train = str(ROOT / "train.py")
        nodes.append(torchrun(2, *elastic, train, *argv, before=inside, GLOO_SOCKET_IFNAME="eth"))
    until = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoints" / "step_00000008").exists():
        assert time.monotonic() < until
        time.sleep(0.001)
    kill_all(NAMES[1])
    finish(nodes[0])
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert [manifest["ranks"], *(x["ranks"] for x in manifest["resumes"])] == [4, 2]
    for name in ("train_loss", "val_loss"):
        assert series(tmp_path / "run", name) == pytest.approx(series(whole, name), rel=1e-5)
