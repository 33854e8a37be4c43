"""Kernels of others, from Triton to a result on the CPU: what a user of the executor writes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from simgpu.executor import Compiled, run_ptx

HERE = Path(__file__).parent
SIMGPU = """
import os, sys
import simgpu, simgpu.plugin, simgpu.executor
assert not {"torch", "triton", "simgpu.operators", "simgpu.build"} & {*sys.modules}
assert "SIMGPU" not in os.environ
"""
TORCH = """
import sys, torch
assert not [name for name in sys.modules if name.startswith("simgpu")]
"""
EVERY_ARCH = """
from simgpu.executor import executed_on_cpu
from yourfile import check

for arch in (80, 86, 89, 90, 100, 120):
    with executed_on_cpu(arch) as launches:
        check()
    print(arch, len(launches))
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python where `yourfile` can be imported and nothing is interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is a CUDA build of PyTorch")
@pytest.mark.parametrize("imports", [SIMGPU, TORCH])
def test_nothing_is_started_that_was_not_asked_for(imports):
    """Importing simgpu imports neither torch nor Triton, and importing torch nothing of simgpu."""
    done = run("-c", imports)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is a CUDA build of PyTorch")
def test_an_entry_point_of_an_earlier_version_starts_nothing(tmp_path, monkeypatch):
    stale = tmp_path / "simgpu-0.1.0.dist-info"
    stale.mkdir()
    (stale / "entry_points.txt").write_text("[torch.backends]\nsimgpu = simgpu:_after_torch\n")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    done = run("-c", "import sys, torch; assert 'simgpu' in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is a CUDA build of PyTorch")
@pytest.mark.parametrize(
    ("command", "status"), [("simgpu a.py", 2), (f"pytest -p simgpu.plugin --simgpu {__file__}", 4)]
)
def test_without_a_cuda_build_there_is_one_line_and_no_traceback(command, status):
    done = run("-m", *command.split())
    assert done.returncode == status
    assert done.stderr.strip().endswith("is not a CUDA build of PyTorch")
    assert done.stderr.strip().count("\n") == 0


def test_kernels_run_as_compiled_for_each_arch():
    done = run("-c", EVERY_ARCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{arch} 3" for arch in (80, 86, 89, 90, 100, 120)]


@pytest.mark.parametrize(
    ("file", "status", "says"),
    [
        ("yourfile.py", 0, r"sm_80: softmax 2x, matmul 1x: no fault, [\d.]+ s"),
        # kernel, thread, line and tensor
        ("yourfile.py:forgotten", 1, r"error: softmax: reads 4 bytes outside of every tensor, "
         r"x\+\d+ bytes; block 4, thread \d+, PTX line \d+ \(yourfile.py:12\): @.*"),
        ("yourfile.py:nothing", 2, r"(.|\n)*error: \S+yourfile.py has no function nothing"),
        ("missing.py", 2, r"(.|\n)*error: there is no file \S+missing.py"),
    ],
)  # fmt: skip
def test_a_file_of_a_user_is_run_by_a_command(file, status, says):
    done = run("-m", "simgpu.executor", HERE / file, "--arch", "80")
    assert done.returncode == status, done.stderr
    assert re.fullmatch(says, (done.stdout + done.stderr).strip())


def test_wrong_arguments_are_one_clear_error():
    text = ".visible .entry f(.param .u64 p0)\n{\nret;\n}"
    with pytest.raises(ValueError, match="f has 1 parameters, got 2"):
        run_ptx(Compiled(text, warps=1, shared=0), (1,), [0, 0])
