"""Kernels of others, from Triton to a result on the CPU: what a user of the executor writes."""

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.processes import ROOT, python

SCRIPT = """
import torch, triton, triton.language as tl

@triton.jit
def softmax(x, y, n, stride, BLOCK: tl.constexpr, MASK: tl.constexpr = True):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < n if MASK else column < BLOCK
    logits = tl.load(x + row * stride + column, inside, other=float("-inf")).to(tl.float32)
    e = tl.exp(logits - tl.max(logits, 0))
    tl.store(y + row * stride + column, (e / tl.sum(e, 0)).to(y.dtype.element_ty), inside)

@triton.jit
def matmul(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None], tl.arange(0, K)
    product = tl.dot(tl.load(a + m * K + k[None]), tl.load(b + k[:, None] * N + n))
    tl.store(c + m * N + n, product)

def check():
    for dtype, most in ((torch.float32, 1e-7), (torch.bfloat16, 1e-3)):
        x = torch.randn(5, 300).to(dtype)
        y = torch.empty_like(x)
        softmax[lambda given: (2560 // given["BLOCK"],)](x, y, 300, stride=300, BLOCK=512)
        assert (y.float() - x.float().softmax(-1)).abs().max() < most
    a, b, c = torch.randn(64, 32).half(), torch.randn(32, 64).half(), torch.empty(64, 64)
    matmul[(1,)](a, b, c, M=64, N=64, K=32, num_warps=4)
    assert torch.allclose(c, a.float() @ b.float(), atol=1e-5)

def forgotten():
    x = torch.randn(5, 300)
    softmax[(5,)](x, x, 300, 300, 512, MASK=False)

if __name__ == "__main__":
    check()
"""
EVERY_ARCH = """
from fastgpt.kernels.proof.execute import executed_on_cpu
from yourfile import check

for arch in (80, 86, 89, 90, 100, 120):
    with executed_on_cpu(arch) as launches:
        check()
    print(arch, len(launches))
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python where a user's file is to be found."""
    (tmp_path / "yourfile.py").write_text(SCRIPT)
    return partial(python, TRITON_INTERPRET=None, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")


def test_kernels_run_as_compiled_for_each_arch(run):
    done = run("-c", EVERY_ARCH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{arch} 3" for arch in (80, 86, 89, 90, 100, 120)]


@pytest.mark.parametrize(
    ("file", "status", "says"),
    [
        ("yourfile.py", 0, r"sm_80: softmax 2x, matmul 1x: no fault, [\d.]+ s"),
        # kernel, thread, line and tensor
        ("yourfile.py:forgotten", 1, r"error: softmax: reads 4 bytes outside of every tensor, "
         r"x\+\d+ bytes; block 4, thread \d+, PTX line \d+ \(yourfile.py:8\): @.*"),
        ("yourfile.py:nothing", 2, r"(.|\n)*error: \S+yourfile.py has no function nothing"),
        ("missing.py", 2, r"(.|\n)*error: there is no file \S+missing.py"),
    ],
)  # fmt: skip
def test_a_file_of_a_user_is_run_by_a_command(run, tmp_path, file, status, says):
    done = run("-m", "kernels.proof.execute", tmp_path / file, "--arch", "80")
    assert done.returncode == status, done.stderr
    assert re.fullmatch(says, (done.stdout + done.stderr).strip())


def test_wrong_arguments_are_one_clear_error():
    from fastgpt.kernels.proof.execute import Compiled, run_ptx

    text = ".visible .entry f(.param .u64 p0)\n{\nret;\n}"
    with pytest.raises(ValueError, match="f has 1 parameters, got 2"):
        run_ptx(Compiled(text, warps=1, shared=0), (1,), [0, 0])
