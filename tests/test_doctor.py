"""Simulated broken machines are found and get their cure; estimates of a run hold what they say."""

import importlib.metadata
import itertools
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from bench.memory import account
from fastgpt.config.recipes import RECIPES
from fastgpt.device import device
from fastgpt.doctor import __main__ as doctor
from fastgpt.doctor import checks, plan
from fastgpt.errors import UserError
from fastgpt.kernels.specs import SPECS
from tests.data.sets import flip, prepared
from tests.processes import python

OLD = "The NVIDIA driver on your system is too old (found version 11040). Please"
FULL = OSError(28, os.strerror(28))


def raising(error):
    return Mock(side_effect=error)


class Machine:
    """What this process sees of its machine, which a test changes."""

    def __init__(self, monkeypatch, folder):
        self.patch, self.folder = monkeypatch.setattr, folder
        self.item, self.env = monkeypatch.setitem, monkeypatch.setenv
        self.env("FASTGPT_DATA", str(folder))
        monkeypatch.chdir(folder)

    def toolchain(self, *installed):
        self.env("CC", "gcc")
        self.env("CXX", "g++")
        for name in installed:
            (self.folder / name).touch(mode=0o755)
        self.env("PATH", str(self.folder))
        self.patch("sysconfig.get_paths", lambda _: {"include": str(self.folder)})

    def disk(self, total=1e12, free=1e12):
        self.patch(shutil, "disk_usage", lambda _: SimpleNamespace(total=total, free=free))

    def nvidia(self, built="13.0", driver=True, gpus=0, free=2**30, error=None, hidden=False):
        self.env("CUDA_VISIBLE_DEVICES", "" if hidden else "0,1")
        self.patch(torch.version, "cuda", built)
        self.patch(device, "DRIVER", self.folder / "version")
        if driver:
            device.DRIVER.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  W")
        answers = {"is_available": gpus > 0, "device_count": gpus, "get_device_name": "NVIDIA L4"}
        for name, answer in {**answers, "mem_get_info": (free, 2**30)}.items():
            self.patch(torch.cuda, name, lambda *_, x=answer: x)
        self.patch(torch.cuda, "init", raising(RuntimeError(error)) if error else lambda: None)
        self.patch(torch.distributed, "is_nccl_available", lambda: built == "with NCCL")

    def versions(self, triton, pytorch):
        self.patch(torch, "__version__", pytorch)
        self.patch(importlib.metadata, "version", lambda _: triton)

    def shard(self, file, byte):
        flip(prepared(self.folder / "mine", [f"text {i}" for i in range(200)]) / file, byte)

    def rotary(self, op):
        self.item(SPECS, "rotary", replace(SPECS["rotary"], cpu=op))


def one_percent_off(q, k, **options):
    q, k = SPECS["rotary"].ref(q, k, **options)
    return q, 1.01 * k


# Each: how the machine is broken; the check, state, words and cure of the one finding.
FAULTS = {
    "no compiler": (lambda m: m.toolchain("Python.h"),
        "compiler", "warning", "no C compiler was found .CC is gcc", "install gcc"),
    "no Python.h": (lambda m: m.toolchain("gcc", "g++"),
        "compiler", "warning", "Python.h is missing", r"apt install python3\.\d+-dev"),
    "no C++ compiler": (lambda m: m.toolchain("gcc", "Python.h"),
        "compiler", "warning", "no C.. compiler", r"install g\+\+"),
    "small /dev/shm": (lambda m: m.disk(total=2**26),
        "limits", "warning", "64 MiB .*too little for NCCL", "--shm-size=1g"),
    "few open files": (lambda m: m.patch("resource.getrlimit", lambda _: (256, 256)),
        "limits", "warning", "256 open files: too few", "ulimit -n 4096"),
    "disk full": (lambda m: m.patch(os, "fsync", raising(FULL)),
        "disk of data", "problem", "No space left", "free some space.*FASTGPT_DATA"),
    "slow disk": (lambda m: m.patch("time.perf_counter", itertools.count().__next__),
        "disk of runs", "warning", " [1-4] MB/s .*slow", "faster disk: --run-dir"),
    "wrong Triton": (lambda m: m.versions("3.6.0", "2.13.0+cu130"),
        "versions", "problem", "3.6.0: .*needs Triton 3.7.1", "triton==3.7.1"),
    "unknown torch": (lambda m: m.versions("3.7.1", "2.99.0"),
        "versions", "warning", "2.99.0.*never run", "torch==2.13.0 triton==3.7.1"),
    "broken torch": (lambda m: m.item(sys.modules, "torch", None),
        "versions", "problem", "failed: ModuleNotFoundError.*torch", "make setup|venv"),
    "old driver": (lambda m: m.nvidia(error=OLD),
        "GPU", "problem", "driver on your system is too old", "a newer NVIDIA driver"),
    "CPU build": (lambda m: m.nvidia(built=None),
        "GPU", "problem", "built without CUDA", "install a CUDA build of torch"),
    "CUDA build without a driver": (lambda m: m.nvidia(driver=False),
        "GPU", "warning", "no NVIDIA driver is loaded", "install the driver"),
    "hidden GPU": (lambda m: m.nvidia(hidden=True),
        "GPU", "warning", "CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES"),
    "GPU in use": (lambda m: m.nvidia(gpus=1, free=2**28),
        "GPU", "warning", "L4, 1.0 GiB, driver 470.82.01: other .* 0.8 GiB", "nvidia-smi"),
    "no NCCL": (lambda m: m.nvidia(gpus=2),
        "GPU", "problem", "NCCL is not in this torch, which 2 GPUs", "a CUDA build"),
    "damaged shard": (lambda m: m.shard("train_000000.bin", 1500),
        "data", "problem", "train_000000.bin is damaged", "copy .*mine again"),
    "wrong op": (lambda m: m.rotary(one_percent_off),
        "ops", "problem", "rotary is wrong on cpu: output 1", "--ops"),
    "failing op": (lambda m: m.rotary(raising(RuntimeError("CUDA error: illegal address"))),
        "ops", "problem", "rotary is wrong on cpu: RuntimeError: CUDA error", "--ops"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_cure_named(name, monkeypatch, tmp_path):
    change, check, *expected = FAULTS[name]
    with monkeypatch.context() as patch:
        change(Machine(patch, tmp_path))
        [finding] = [x for x in checks.of(check) if x.state != "ok"]
    for pattern, words in zip(expected, (finding.state, finding.found, finding.cure)):
        assert re.search(pattern, words), finding


def test_sound_gpus_are_ok(monkeypatch, tmp_path):
    Machine(monkeypatch, tmp_path).nvidia("with NCCL", gpus=2)
    assert [x.state for x in checks.of("GPU")] == ["ok"] * 3


def test_a_check_whose_process_dies_is_a_finding(monkeypatch, capsys):
    monkeypatch.setitem(checks.CHECKS, "limits", lambda: os.kill(os.getpid(), 9))
    monkeypatch.setattr(doctor, "CHECKS", ["python", "limits", "compiler"])
    assert doctor.main(["--json", "-"]) == 1
    states = {x["check"]: x["state"] for x in json.loads(capsys.readouterr().out)["findings"]}
    assert states == {"python": "ok", "limits": "problem", "compiler": "ok"}


@pytest.mark.parametrize(("options", "found"), [((), "14 of 14"), (("-ES",), "No module named")])
def test_it_runs_with_and_without_torch(options, found, tmp_path):
    out = tmp_path / "found.json"
    given = {"FASTGPT_DATA": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": None}
    done = python(*options, "-m", "fastgpt.doctor", "--json", out, **given)
    written = json.loads(out.read_text())
    assert found in written["findings"][-1]["found"]
    assert done.returncode == ("-ES" in options) == written["counts"]["problem"], done.stdout
    assert done.stdout.splitlines()[-1].endswith(f" {written['counts']['ok']} ok")


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture
def told(capsys):
    """Function that runs the command, and returns what it found by check."""

    def run(argv):
        status = doctor.main([*argv.split(), "--json", "-"])
        found = {x["check"]: x for x in json.loads(capsys.readouterr().out)["findings"]}
        assert status == any(x["state"] == "problem" for x in found.values())
        return found

    return run


@pytest.mark.parametrize(
    ("recompute", "changes", "within"),
    [
        ("none", {}, 0.05), ("selective", {}, 0.05), ("full", {}, 0.05),
        ("none", {"num_kv_heads": 4, "tied": False}, 0.05),
        ("selective", {"qk_norm": True, "norm": "rmsnorm", "bias": False}, 0.2),
    ],
)  # fmt: skip
def test_the_estimate_is_what_the_tensors_take(recompute, changes, within):
    config = RECIPES["gpt2-124m"][1]
    model = replace(config.model, num_layers=4, **changes)
    train = replace(config.train, recompute=recompute, residual="fp32")
    parts = plan.by_part(replace(config, model=model, train=train), 64, 1, plan.H100_BYTES)
    counted = account(model, 64, "chunked", recompute=recompute)
    assert parts["weights"] == pytest.approx(counted.weights, rel=0.01)
    assert sum(parts.values()) - parts["optimizer"] == pytest.approx(counted.peak, rel=within)


@pytest.mark.parametrize(
    ("argv", "check", "cure"),
    [
        ("gpt2-124m --gpu 16 --gpus 4", "memory", "--train.micro-batch 32"),
        ("gpt2-1558m --gpu 4090", "memory", "--train.recompute full, or --parallel.kind fsdp"),
        ("baby --gpus 3", "batch", "--train.batch-tokens 3840"),
        ("gpt2-124m --data.source prepared:x", "data", "get SOURCE and run python -m fastgpt.prep"),
    ],
)
def test_what_does_not_fit_does_with_its_cure(argv, check, cure, told):
    found = told(argv)[check]
    assert (found["state"], found["cure"][: len(cure)]) == ("problem", cure)
    if cure[-1].isdigit():
        assert told(f"{argv} {cure}")[check]["state"] == "ok"


def test_passes_and_days(tmp_path, told, monkeypatch):
    data = prepared(tmp_path / "mine", [f"text {i}" for i in range(200)])
    tokens = json.loads((data / "manifest.json").read_text())["splits"]["train"]["tokens"]
    argv = f"baby --data.source {data} --epochs 2.5 --gpu h100 --gpus 2"
    found = told(f"{argv} --tok-per-s 100")
    assert found["data"]["found"] == f"2.50 passes over {tokens:,} tokens of {data}"
    assert found["time"]["found"].startswith(f"{2.5 * tokens / 100 / 86400:.3g} days for ")
    assert told(argv)["time"]["state"] == "warning"
    folder = tmp_path / "bench" / "results" / "x"
    folder.mkdir(parents=True)
    row = {"kind": "step", "implementation": "fastgpt", "device": "NVIDIA H100 80GB HBM3"}
    row |= {"recipe": "baby", "shape": {"B": 4, "T": 256}, "seconds": {"p50": 0.5}, "run": "2026-2"}
    others = {"run": "2026-1"}, {"run": "3", "device": "NVIDIA A100"}, {"run": "4", "recipe": "x"}
    rows = "\n".join(json.dumps(row | change) for change in ({}, *others))
    (folder / "a.jsonl").write_text(rows)
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    assert "at 4,096 tokens/s, the record of 2026-2 on" in told(argv)["time"]["found"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("nope", "unknown recipe 'nope'"), ("nope.yaml", "nope.yaml cannot be read"),
        ("baby --gpu h10", "unknown --gpu 'h10'; did you mean 'h100'"),
        ("baby --gpus 0", "--gpus is 0: expected a number greater than 0"),
        ("baby --gpus x", "invalid int value: 'x'"), ("baby --nope 1", "--nope"),
        ("baby --tok-per-s nan", "--tok-per-s is nan"), ("--gpus 8", "expected a recipe before"),
        ("--json missing/x.json", "--json is 'missing/x.json': expected a file in a folder that"),
        ("baby --parallel.cp 3 --gpus 4", "expected a divisor of the number of ranks, 4"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_before_any_check(argv, said):
    with pytest.raises(UserError, match=re.escape(said)):
        doctor.main(argv.split())
