"""NVIDIA's compute-sanitizer over every op at small shapes that do not fit the tiles."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

OPS = {
    "attention": """
from fastgpt.kernels.attention.spec import ATTENTION, problem
from tests.kernels.conformance import make_inputs, run

for s in (
    problem(1, 65, 2, 64, K=1),
    problem(1, 33, 1, 80, Tk=100, causal=False),
    problem(1, 130, 1, 128),
    problem(2, 100, 2, 16, window=9, dropout_p=0.1, docs=30),
):
    tensors = make_inputs(ATTENTION, s, "cuda", torch.float16).values()
    run(ATTENTION, ATTENTION.call(ATTENTION.op, s, "cuda"), tensors)
""",
    "norms": """
from fastgpt.kernels import add_layer_norm, rms_norm

for M, N in ((3, 65), (257, 100), (5, 8193)):
    x, r = (torch.randn(M, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2))
    w, b = (torch.randn(N, device="cuda", requires_grad=True) for _ in range(2))
    y, total = add_layer_norm(x, r, w, b)
    (y.square().sum() + total.sum() + rms_norm(x, w).square().sum()).backward()
""",
    "losses": """
from fastgpt.kernels import cross_entropy, linear_cross_entropy

for M, V in ((3, 65), (130, 2049), (2, 50_257)):
    targets = torch.randint(V, (M,), device="cuda")
    targets[0] = -100
    for inplace in (False, True):
        logits = torch.randn(M, V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        cross_entropy(logits * 1, targets, inplace_grad=inplace).backward()
    x, w = (torch.randn(n, 40, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for n in (M, V))
    linear_cross_entropy(x, w, targets, chunk_tokens=100).backward()
""",
    "activations": """
from fastgpt.kernels import bias_act
from fastgpt.kernels.bias_act.op import ACTIVATIONS

for kind in ACTIVATIONS:
    for M, N in ((3, 66), (257, 100), (5, 2050)):
        x, b = (torch.randn(*shape, device="cuda", dtype=torch.float16, requires_grad=True)
                for shape in ((M, N), (N,)))
        bias_act(x, b, kind).square().sum().backward()
""",
    "rotary": """
from fastgpt.kernels import rotary

for B, T, H, K, D in ((2, 65, 3, 1, 64), (1, 100, 2, 2, 80)):
    cos, sin = torch.randn(2, T, D // 2, device="cuda").unbind()
    for options in ({}, {"interleaved": True}, {"inplace": True}):
        qkv = torch.randn(B, T, H + 2 * K, D, device="cuda", requires_grad=True)
        source = qkv * 1
        q, k = rotary(source[:, :, :H], source[:, :, H : H + K], cos, sin, **options)
        (q.square().sum() + k.square().sum()).backward()
""",
    "decode": """
from fastgpt.kernels.decode_attention.spec import DECODE_ATTENTION, problem
from tests.kernels.conformance import make_inputs, run

for s in (
    problem(600, 4, 64, (600, 3, 0), K=2, starts=True),
    problem(200, 4, 80, (200, 1), Tq=3, K=1, page=5, starts=True),
):
    tensors = make_inputs(DECODE_ATTENTION, s, "cuda", torch.float16).values()
    run(DECODE_ATTENTION, DECODE_ATTENTION.call(DECODE_ATTENTION.op, s, "cuda"), tensors)
""",
}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("op", OPS)
def test_compute_sanitizer_finds_nothing(op, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit on PATH")
    script = f"import torch\n{OPS[op]}\ntorch.cuda.synchronize()"
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", script],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
        # each buffer an allocation of its own: what is read beyond it is seen
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
