"""Importing simgpu or its executor imports neither torch nor Triton, and starts no GPU."""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import os, sys
import simgpu, simgpu.plugin, simgpu.executor
simgpu._after_torch()  # as `import torch` calls it
assert not {"torch", "triton", "simgpu.operators", "simgpu.build"} & {*sys.modules}
assert "SIMGPU" not in os.environ
"""


def test_nothing_is_started_that_was_not_asked_for():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is a CUDA build of PyTorch")
def test_without_a_cuda_build_there_is_one_line_and_no_traceback():
    for command, status in ((["simgpu", "a.py"], 2), (["pytest", "--simgpu", __file__], 4)):
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        assert done.returncode == status
        assert done.stderr.strip().endswith("is not a CUDA build of PyTorch")
        assert done.stderr.strip().count("\n") == 0
