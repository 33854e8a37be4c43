"""GPUs that torch cannot use, or not for this run, are errors that say what to do."""

import re
from unittest import mock

import pytest
import torch

from fastgpt.autotune import choose
from fastgpt.autotune.trials import Sizes
from fastgpt.cli import configure
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.device import device
from fastgpt.errors import UserError
from fastgpt.parallel import distributed
from fastgpt.parallel.distributed import World
from fastgpt.train.trainer import Trainer

OLD = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulates a machine's NVIDIA driver and build of torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")

    def make(loaded=False, built: str | None = "13.0"):
        if loaded:
            (tmp_path / "version").touch()
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=RuntimeError(f"{OLD}.")))

    return make


@pytest.mark.parametrize(
    ("facts", "visible", "said"),
    [
        ({"loaded": True}, "0", OLD),
        ({"loaded": True, "built": None}, "0", "install a CUDA build of torch"),
        ({}, "0", ""),
        ({"loaded": True}, "", ""),
        ({"loaded": True}, "-1", ""),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_never_left_for_the_cpu_unless_it_is_hidden(
    machine, facts, visible, said, monkeypatch
):
    machine(**facts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if said:
        with pytest.raises(UserError, match=re.escape(said)):
            device.pick_device("auto")
    else:
        assert device.pick_device("auto") == "cpu"
    with pytest.raises(UserError, match=re.escape(said or "expected one, its driver")):
        device.pick_device("cuda")
    assert device.pick_device("cpu") == "cpu"


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match=r"8 processes .* with 4 CUDA devices: .*_per_node=4$"):
        distributed._take_device("cuda", World(rank=5, local_rank=5, size=8, local_size=8))
    with pytest.raises(UserError, match="2 processes were started: expected one on MPS"):
        distributed._take_device("mps", World(size=2))


@pytest.fixture
def toolchain(monkeypatch, tmp_path):
    """Simulates which compilers and headers are installed."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    include = tmp_path / "include"
    include.mkdir()
    monkeypatch.setattr("sysconfig.get_paths", lambda _: {"include": str(include)})

    def install(*names: str):
        for name in names:
            (include if name == "Python.h" else tmp_path).joinpath(name).touch(mode=0o755)

    return install


@pytest.mark.parametrize(
    ("installed", "cc", "missing"),
    [
        (["gcc"], None, r"Python\.h is missing"),
        (["g++", "Python.h"], None, r"no C compiler was found \(CC, gcc, clang\)"),
        (["gcc", "Python.h"], "/opt/cc", r"no C compiler was found \(CC is /opt/cc\)"),
    ],
)
def test_what_kernels_lack_is_found_before_any_trial(
    toolchain, monkeypatch, installed, cc, missing
):
    toolchain(*installed)
    if cc:
        monkeypatch.setenv("CC", cc)
    tried, said, asked = mock.Mock(return_value={}), [], OpsConfig(attention="triton")
    monkeypatch.setattr(choose, "remembered_or_tried", tried)
    sizes = Sizes(ModelConfig(), 1, "bf16", True)
    assert choose.choose(OpsConfig(), sizes, "cuda", said.append) == ({}, {})
    assert re.search(rf"^[^\n]*{missing}[^\n]*$", *said)
    choose.require_toolchain(OpsConfig(), "cuda")
    choose.require_toolchain(asked, "cpu")
    with pytest.raises(UserError, match=rf"^--ops.attention is triton: .*{missing}"):
        choose.require_toolchain(asked, "cuda")
    monkeypatch.setattr(device, "has_compiler", lambda: True)
    compiled, note = device.pick_compile("auto", "cuda")
    assert (compiled, note[-22:]) == (False, "; torch.compile is off"), note
    assert not tried.called
    monkeypatch.delenv("CC", raising=False)
    toolchain("clang", "Python.h")
    choose.choose(OpsConfig(), sizes, "cuda", print)
    choose.require_toolchain(asked, "cuda")
    assert tried.called


def test_kernels_without_a_compiler_are_an_error_before_data_is_read(toolchain, monkeypatch, tiny):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flags = "--train.device cuda --ops.kernels triton --data.source nowhere"
    with pytest.raises(UserError, match=r"--ops.kernels is triton: no C compiler was found"):
        Trainer(configure(tiny(flags)))
