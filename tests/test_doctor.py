"""Simulated broken machines are found and get their cure; estimates of a run hold what they say."""

import gc
import importlib.metadata
import json
import os
import re
import weakref
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastgpt.config.config import OpsConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.device import device
from fastgpt.doctor import __main__ as doctor
from fastgpt.doctor import checks, plan
from fastgpt.kernels.cross_entropy import chunks
from fastgpt.kernels.runtime import H100_BYTES, recording
from fastgpt.kernels.specs import SPECS
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from tests.data.sets import flip, prepared
from tests.processes import python


class Machine:
    """Answers of the system to this process, which a test changes."""

    def __init__(self, monkeypatch, folder):
        self.patch, self.folder = monkeypatch.setattr, folder
        self.env = monkeypatch.setenv
        self.env("FASTGPT_DATA", str(folder))
        monkeypatch.chdir(folder)

    def toolchain(self, *installed):
        self.env("CC", "gcc")
        self.env("CXX", "g++")
        for name in installed:
            (self.folder / name).touch(mode=0o755)
        self.env("PATH", str(self.folder))
        self.patch("sysconfig.get_paths", lambda _: {"include": str(self.folder)})

    def nvidia(self, driver=True, gpus=0, free=2**30, error=None):
        self.env("CUDA_VISIBLE_DEVICES", "0,1")
        self.patch(torch.version, "cuda", "13.0")
        self.patch(device, "DRIVER", self.folder / "version")
        if driver:
            device.DRIVER.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  W")
        answers = {"is_available": gpus > 0, "device_count": gpus, "get_device_name": "NVIDIA L4"}
        for name, answer in {**answers, "mem_get_info": (free, 2**30)}.items():
            self.patch(torch.cuda, name, lambda *_, x=answer: x)
        self.patch(torch.cuda, "init", Mock(side_effect=error and RuntimeError(error)))
        self.patch(torch.distributed, "is_nccl_available", lambda: False)

    def shared(self, path):
        return Mock(total=2**26)

    def versions(self):
        self.patch(torch, "__version__", "2.13.0+cu130")
        self.patch(importlib.metadata, "version", lambda _: "3.6.0")

    def damage(self):
        folder = prepared(self.folder / "mine", [f"text {i}" for i in range(200)])
        flip(folder / "train_000000.bin", 1500)

    def rotary(self, op):
        wrong = {"rotary": replace(SPECS["rotary"], cpu=op)}
        self.patch("fastgpt.kernels.specs.SPECS", {"dropout": SPECS["dropout"], **wrong})


# The check, the state, and words of what is found and of its cure; how the machine is broken.
FULL = OSError(28, "No space left on device")
FAULTS = {
    "compiler warning .*install gcc": lambda m: m.toolchain("Python.h"),
    "limits warning 64 MiB .*--shm-size": lambda m: m.patch("shutil.disk_usage", m.shared),
    "disk problem .*No space.*free some": lambda m: m.patch(os, "fsync", Mock(side_effect=FULL)),
    "versions problem .*3.6.0.*triton==3.7.1": lambda m: m.versions(),
    "gpus problem .*too old.*newest driver": lambda m: m.nvidia(error="The driver is too old"),
    "gpus warning .*no NVIDIA driver": lambda m: m.nvidia(driver=False),
    "gpus warning .*1.0 GiB, driver 470.82.01: .* 0.8": lambda m: m.nvidia(gpus=1, free=2**28),
    "gpus problem NCCL for 2 GPUs.*a CUDA build": lambda m: m.nvidia(gpus=2),
    "data problem .*train_000000.bin.*copy .*mine again": lambda m: m.damage(),
    "ops problem 1 of 2 .* rotary": lambda m: m.rotary(lambda q, k, **_: (q, k)),
}


@pytest.mark.parametrize("expected", FAULTS)
def test_a_fault_is_found_and_its_cure_named(expected, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        FAULTS[expected](Machine(patch, tmp_path))
        found = checks.run(getattr(checks, expected.split()[0]))
    assert re.search(expected, " ".join(next(x for x in found if x.state != "ok")))


def dies():
    os.kill(os.getpid(), 9)


def test_a_check_whose_process_dies_is_a_finding(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", [checks.python, dies, checks.compiler])
    assert doctor.main([]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["ok", "problem", "cure:", "ok", "1"]


def test_it_runs_without_torch(tmp_path):
    done = python("-ES", "-m", "fastgpt.doctor", "--json", FASTGPT_DATA=str(tmp_path))
    found = {x["check"]: x for x in json.loads(done.stdout)}
    assert (done.returncode, found["python"]["state"], found["disk"]["state"]) == (1, "ok", "ok")
    assert "No module named 'torch'" in found["versions"]["found"]


def told(argv, capsys):
    """Runs the command, and returns what it found by check."""
    status = doctor.main([*argv.split(), "--json"])
    found = {x["check"]: x for x in json.loads(capsys.readouterr().out)}
    assert status == any(x["state"] == "problem" for x in found.values())
    return found


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors, which have no storage, until their last reference ends."""

    def __init__(self, launches) -> None:
        super().__init__()
        self.launches, self.sizes, self.now, self.peak = launches, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches.clear()  # they hold their arguments
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, key)

    def free(self, key):
        self.now -= self.sizes.pop(key)


def memory_use(config, batch, recompute):
    """Returns the bytes of the weights, and the peak of a step in bf16, whose kernels are noted."""
    on_h100 = 2 * H100_BYTES // chunks.GPU_SHARE  # logits are counted there as fp32
    ops = tables.select(OpsConfig(attention="triton", kernels="triton", loss="chunked"), "cpu")
    with (
        patch.object(chunks, "CPU_BYTES", on_h100),
        recording(90) as launches,
        FakeTensorMode(),
        LiveBytes(launches) as live,
    ):
        model = GPT(config, ops, recompute=recompute)
        gc.collect()
        weights = live.peak = live.now
        tokens = torch.zeros(batch, config.context, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            result = model(tokens, tokens)
        result.backward()
        return weights, live.peak


@pytest.mark.parametrize(
    ("recompute", "changes", "within"),
    [
        ("none", {}, 0.05), ("full", {"num_kv_heads": 4, "tied": False}, 0.05),
        ("selective", {"qk_norm": True, "norm": "rmsnorm", "bias": False}, 0.2),
    ],
)  # fmt: skip
def test_the_estimate_is_what_the_tensors_take(recompute, changes, within):
    config = RECIPES["gpt2-124m"][1]
    model = replace(config.model, num_layers=4, **changes)
    train = replace(config.train, recompute=recompute, residual="fp32")
    parts = plan.by_part(replace(config, model=model, train=train), 64, 1, H100_BYTES)
    weights, peak = memory_use(model, 64, recompute)
    assert parts["weights"] == pytest.approx(weights, rel=0.01)
    assert sum(parts.values()) - parts["optimizer"] == pytest.approx(peak, rel=within)


@pytest.mark.parametrize(
    ("argv", "check", "cure"),
    [
        ("gpt2-124m --gpu 16 --gpus 4", "memory", "--train.micro-batch 32"),
        ("gpt2-1558m --gpu 4090", "memory", "--train.recompute full, or --parallel.kind fsdp"),
        ("baby --gpu h100 --gpus 3", "batch", "--train.batch-tokens 3840"),
        ("baby --gpu h100 --data.source prepared:x", "data", "get SOURCE"),
    ],
)
def test_what_does_not_fit_does_with_its_cure(argv, check, cure, capsys):
    found = told(argv, capsys)[check]
    assert (found["state"], found["cure"][: len(cure)]) == ("problem", cure)
    if cure[-1].isdigit():
        assert told(f"{argv} {cure}", capsys)[check]["state"] == "ok"


def test_passes_and_days(tmp_path, capsys):
    data = prepared(tmp_path / "mine", [f"text {i}" for i in range(200)])
    tokens = json.loads((data / "manifest.json").read_text())["splits"]["train"]["tokens"]
    argv = f"baby --data.source {data} --epochs 2.5 --gpu h100 --gpus 2"
    found = told(f"{argv} --tok-per-s 100", capsys)
    assert found["data"]["found"] == f"2.50 passes over {tokens:,} tokens of {data}"
    assert found["time"]["found"].startswith(f"{2.5 * tokens / 100 / 86400:.3g} days for ")
    assert told(argv, capsys)["time"]["state"] == "warning"
