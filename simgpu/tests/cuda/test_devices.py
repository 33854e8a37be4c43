"""Devices, memory, streams and calls that are made to fail."""

import subprocess
import sys

import pytest

import simgpu


def test_a_size_is_a_number_with_a_unit():
    sizes = {"2GiB": 2**31, "512MiB": 2**29, "3KiB": 3072, "17": 17}
    assert {text: simgpu.size(text) for text in sizes} == sizes
    for text in ("", "2GB", "GiB", "-1", "1.5GiB"):
        with pytest.raises(ValueError, match="is no size: expected one such as 2GiB"):
            simgpu.size(text)


def test_start_after_torch_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", object())
    with pytest.raises(RuntimeError, match="before"):
        simgpu.start()


def test_the_form_for_pytest(tmp_path):
    (tmp_path / "test_it.py").write_text("""
import torch

def test_it():
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.ones(3, device="cuda").sum().item() == 3
""")
    flags = ("-p", "simgpu.plugin", "--simgpu", "--simgpu-arch", "80", "test_it.py")
    subprocess.run([sys.executable, "-m", "pytest", *flags], cwd=tmp_path, check=True)


@pytest.mark.parametrize(("arch", "shared"), [(80, 163), (90, 227), (100, 227)])
def test_a_device_is_what_was_asked_for(simulated, arch, shared):
    text = """
import torch
print(torch.cuda.device_count(), torch.cuda.get_device_capability(1))
p = torch.cuda.get_device_properties(0)
print(p.total_memory >> 20, p.shared_memory_per_block_optin >> 10)
"""
    said = simulated(text, flags=f"--arch {arch} --gpus 2 --memory 512MiB")
    assert said.splitlines()[:2] == [f"2 ({arch // 10}, {arch % 10})", f"512 {shared}"]


def test_visible_devices_count(simulated, monkeypatch):
    text = """
import os, subprocess, sys
ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
for shown in ("", "1", "0,2", "5,0"):
    subprocess.run(ask, env=os.environ | {"CUDA_VISIBLE_DEVICES": shown}, check=True)
"""
    assert simulated(text, flags="--gpus 3").split() == ["0", "1", "2", "0"]


def test_memory_runs_out_and_comes_back(simulated):
    text = """
import torch
def fill():
    return torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
a = fill()
try:
    fill()
except torch.OutOfMemoryError as error:
    print("out of memory", "256.00 MiB" in str(error))
del a
b = fill()
print(torch.cuda.memory_allocated() >> 20)
"""
    said = simulated(text, flags="--memory 256MiB").split("\n")
    assert said[:2] == ["out of memory True", "200"]


def test_fresh_memory_is_nan_and_the_host_cannot_touch_it(simulated):
    text = """
import ctypes, torch
x = torch.empty(100, device="cuda")
print(x.isnan().all().item(), flush=True)
ctypes.string_at(x.data_ptr(), 1)
"""
    assert simulated(text, status=-11).startswith("True")


def test_a_copy_to_pinned_memory_arrives_when_it_is_waited_for(simulated):
    said = simulated("""
import torch
x, host = torch.ones(4, device="cuda"), torch.zeros(4).pin_memory()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    host.copy_(x, non_blocking=True)
    event = side.record_event()
print(host.sum().item(), end=" ")
torch.cuda.current_stream().synchronize()
print(host.sum().item(), end=" ")
event.synchronize()
print(host.sum().item())
""")
    assert said.split() == ["0.0", "0.0", "4.0"]


def test_a_call_fails_when_asked_to(simulated):
    text = """
import torch
for i in range(3):
    try:
        torch.cuda.current_stream().synchronize()
        print("done")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
    said = simulated(text, flags="--fail cudaStreamSynchronize:2:719", cold=True)
    assert "simgpu: call 2 of cudaStreamSynchronize fails, as SIMGPU_FAIL asks for" in said
    lines = [line for line in said.splitlines() if not line.startswith("simgpu")]
    assert lines[:3] == ["done", "CUDA error: unspecified launch failure", "done"]


def test_what_is_not_simulated_says_its_name(simulated):
    said = simulated("""
import ctypes, torch
def attempt(f):
    try:
        f()
    except (RuntimeError, NotImplementedError) as error:
        print(type(error).__name__, str(error).splitlines()[0])
x = torch.ones(2, 2, device="cuda")
attempt(lambda: torch.ops.aten._cudnn_init_dropout_state(0.5, True, 1, device="cuda"))
same = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")
attempt(lambda: same(x))
attempt(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]).start)
runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda[:2])
runtime.cudaLaunchKernelExC(ctypes.create_string_buffer(99), None, None)
""")
    assert "aten::_cudnn_init_dropout_state has neither a kernel for the CPU nor a decomp" in said
    assert "nvrtcVersion of libnvrtc is not simulated" in said
    assert "CUPTI, which profiles, is not simulated" in said
    assert "is machine code and cannot be run" in said


def test_counts_are_of_what_was_called(simulated):
    said = simulated("""
import simgpu, torch
x = torch.ones(4, device="cuda")
torch.cuda.synchronize()
before = simulated = simgpu.counts()
(x + x).sum().item()
after = simgpu.counts() - before
for name in ("operator", "copy to the host", "copy to the device", "wait"):
    print(after[name], end=" ")
""")
    assert said.split() == ["2", "1", "0", "1"]
