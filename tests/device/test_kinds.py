"""Devices that this machine lacks, simulated: the whole trainer runs, with its tensors on the CPU.

What is asked of PyTorch for the device is patched, and a function mode puts on the CPU what is
asked for there. It refuses fp64 on MPS, which Apple's GPUs lack.
"""

import json
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fastgpt.cli import configure
from fastgpt.device import device
from fastgpt.errors import UserError
from fastgpt.kernels import runtime
from fastgpt.ops import tables
from fastgpt.train.trainer import Trainer
from tests.runs import series

PLAIN = "--ops.attention sdpa --ops.loss torch"


class OnTheCPU(TorchFunctionMode):
    """Puts on the CPU what is asked for on another device, and counts it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.moved = kind, 0

    def here(self, x):
        if isinstance(x, str | torch.device) and str(x).partition(":")[0] == self.kind:
            self.moved += 1
            return "cpu"
        return x

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before, kwargs = self.moved, kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        args = [self.here(x) for x in args]
        kwargs = {name: self.here(x) for name, x in kwargs.items()}
        if self.moved > before and self.kind == "mps":
            assert torch.float64 not in [*args, *kwargs.values()], func
        return func(*args, **kwargs)


@pytest.fixture
def seen(monkeypatch, request):
    """Simulates the device `request.param`; returns the devices that threads were set to."""
    name, calls = request.param, []
    module = {"rocm": torch.cuda, "cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.mps}[name]

    def patch(owner, **functions):
        for function, result in functions.items():
            monkeypatch.setattr(owner, function, lambda *_, result=result, **__: result)

    if name == "mps":
        patch(torch.backends.mps, get_name="a GPU", is_macos_or_newer=False)
        patch(torch.mps, is_available=True, driver_allocated_memory=3 << 30)
    else:
        patch(module, is_available=True, get_device_name="a GPU", is_bf16_supported=True)
        patch(module, is_current_stream_capturing=False, reset_peak_memory_stats=None)
        patch(module, is_initialized=True)
        patch(module, max_memory_allocated=3 << 30, mem_get_info=(2**30, 2**31), current_device=1)
        thread = threading.current_thread
        monkeypatch.setattr(module, "set_device", lambda on: calls.append((thread().name, on)))
    monkeypatch.setattr(torch.version, "hip", "7.1" if name == "rocm" else None)
    monkeypatch.setattr(module, "synchronize", lambda: calls.append("synchronize"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *_: x)
    return calls


@pytest.mark.parametrize(
    ("seen", "kind", "precision"),
    [("mps", "mps", "fp32"), ("xpu", "xpu", "bf16"), ("rocm", "cuda", "bf16")],
    indirect=["seen"],
)
def test_a_run_trains_on_each_kind_of_device(seen, kind, precision, fit, tmp_path, monkeypatch):
    monkeypatch.setitem(tables.DROPOUT, "packed_rng", F.dropout)  # the same masks on the CPU
    flags = "--optim.kind adamw --train.precision auto --model.dropout 0.1 --train.compile "
    plain = fit(flags, "off --train.precision fp32", PLAIN, f"--run-dir {tmp_path / 'cpu'}")
    with OnTheCPU(kind) as mode:
        run = fit(flags, "off" if kind == "cuda" else "auto", "--train.device auto")
    assert mode.moved >= 8 * 3, "x, y and the sum of the losses of each step"
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["device"], manifest["precision"]) == ("a GPU", precision)
    assert manifest["compile"] is False
    assert set(manifest["ops"].values()) == {"sdpa", "torch"}
    assert series(run, "val_loss") == series(plain, "val_loss")
    assert set(series(run, "peak_memory_gib").values()) == {3.0}
    # a new thread begins on GPU 0
    loader, saver = ("fastgpt-loader_0", 1), ("publisher_0", 1)
    assert set(seen) == {"mps": set(), "xpu": {loader}, "cuda": {loader, saver}}[kind]
    device.synchronize(kind)
    assert seen[-1] == "synchronize"


@pytest.mark.parametrize(
    ("seen", "kind", "flags", "message"),
    [
        ("mps", "mps", "--train.compile on", "--train.compile is on: .* MPS"),
        ("mps", "mps", "--train.precision bf16", "bf16, which MPS lacks"),
        ("mps", "mps", "--ops.loss chunked", "loss is chunked: .* MPS"),
        ("xpu", "xpu", "--ops.kernels triton", "kernels is triton: .* XPU"),
        ("rocm", "cuda", "--ops.kernels triton", "kernels is triton: .* ROCm"),
    ],
    indirect=["seen"],
)
def test_what_a_kind_of_device_cannot_do_is_named(seen, kind, flags, message, tiny):
    argv = tiny("--train.device", kind, "--train.compile off", flags)
    with OnTheCPU(kind), pytest.raises(UserError, match=message):
        Trainer(configure(argv))


@pytest.mark.parametrize("seen", ["rocm", "cuda"], indirect=True)
def test_our_kernels_and_their_tables_are_for_cuda_alone(seen, monkeypatch):
    amd, gpu = torch.version.hip is not None, torch.device("cuda", 0)
    monkeypatch.setattr(runtime, "_cuda", lambda _: (90, 132))
    assert runtime.runs_kernels(gpu) is not amd
    assert (runtime.arch(gpu), runtime.multiprocessors(gpu)) == ((0, 2) if amd else (90, 132))
