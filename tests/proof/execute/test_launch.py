"""Kernels of others, from Triton to a result on the CPU: what a user of the executor writes."""

import re

import pytest

from tests.processes import ROOT, python

SCRIPT = """
import torch, triton, triton.language as tl
from fastgpt.kernels.proof.execute import FaultError, Launch, execute

@triton.jit
def softmax(x, y, n, stride, BLOCK: tl.constexpr, MASK: tl.constexpr):
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

torch.manual_seed(0)
for arch in (80, 86, 89, 90, 100, 120):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 300).to(dtype)
        y = torch.empty_like(x)
        execute(Launch(softmax, (x, y, 300, 300), {"BLOCK": 512, "MASK": True}, (5,)), arch)
        error = (y.float() - x.float().softmax(-1)).abs().max().item()
        print("softmax", arch, dtype, error < (1e-7 if dtype is torch.float32 else 1e-3))
    a, b, c = torch.randn(64, 32).half(), torch.randn(32, 64).half(), torch.empty(64, 64)
    execute(Launch(matmul, (a, b, c), {"M": 64, "N": 64, "K": 32, "num_warps": 4}, (1,)), arch)
    print("matmul", arch, torch.allclose(c, a.float() @ b.float(), atol=1e-5))
x = torch.randn(5, 300)
try:
    execute(Launch(softmax, (x, x, 300, 300), {"BLOCK": 512, "MASK": False}, (5,)), 90)
except FaultError as fault:
    print("fault", fault)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Lines of a script of a user, run without the interpreter."""
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    done = python(path, TRITON_INTERPRET=None, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_run_as_compiled_for_each_arch(said):
    results = [line.split() for line in said if not line.startswith("fault")]
    assert len(results) == 6 * 3
    assert [words for words in results if words[-1] != "True"] == []


def test_a_missing_mask_is_named_with_kernel_thread_line_and_tensor(said):
    (fault,) = (line for line in said if line.startswith("fault"))
    place = (
        r"outside of every tensor, x\+\d+ bytes; block 4, thread \d+, PTX line \d+ \(script.py:9\)"
    )
    assert re.search(place, fault), fault


def test_wrong_arguments_are_one_clear_error():
    from fastgpt.kernels.proof.execute import Compiled, run_ptx

    text = ".visible .entry f(.param .u64 p0)\n{\nret;\n}"
    with pytest.raises(ValueError, match="f has 1 parameters, got 2"):
        run_ptx(Compiled(text, warps=1, shared=0), (1,), [0, 0])
