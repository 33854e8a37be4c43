"""Importing simgpu imports neither torch nor Triton, and importing torch nothing of simgpu."""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import os, sys
import simgpu, simgpu.plugin, simgpu.executor
assert not {"torch", "triton", "simgpu.operators", "simgpu.build"} & {*sys.modules}
assert "SIMGPU" not in os.environ
"""
TORCH = """
import sys, torch
assert not [name for name in sys.modules if name.startswith("simgpu")]
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a PyTorch that runs alone")
@pytest.mark.parametrize("script", [SCRIPT, TORCH])
def test_nothing_is_started_that_was_not_asked_for(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is a CUDA build of PyTorch")
def test_without_a_cuda_build_there_is_one_line_and_no_traceback():
    for command, status in (
        (["simgpu", "a.py"], 2),
        (["pytest", "-p", "simgpu.plugin", "--simgpu", __file__], 4),
    ):
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        assert done.returncode == status
        assert done.stderr.strip().endswith("is not a CUDA build of PyTorch")
        assert done.stderr.strip().count("\n") == 0
