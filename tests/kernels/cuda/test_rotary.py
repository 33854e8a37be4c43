"""Tests of rotary position embeddings (RoPE) on a GPU; `test_conformance` has those of every op."""

import pytest
import torch

from fastgpt.kernels import rotary
from fastgpt.kernels.rotary.spec import ROTARY, shape
from tests.kernels import conformance
from tests.kernels.cuda.proof import need, one_at_a_time

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(2, 4096, 16, 4, 128), (1, 1001, 25, 5, 64), (3, 65, 3, 1, 80), (2, 200, 8, 8, 256)],
    ids=str,
)
def test_grouped_and_odd_heads(sizes, dtype):
    conformance.parity(ROTARY, shape(*sizes), "cuda", dtype)


@one_at_a_time
def test_more_than_two_billion_elements():
    B, T, H, D = 36, 65_536, 15, 64
    need(30)
    qk = torch.empty(B, T, H + 1, D, dtype=torch.bfloat16, device="cuda").normal_()
    angles = ROTARY.options({"T": T, "D": D}, "cuda").values()
    last = qk[-1:].clone()  # every element of it lies beyond 2**31
    want = rotary(last[:, :, :H], last[:, :, H:], *angles)
    got = rotary(qk[:, :, :H], qk[:, :, H:], *angles)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[-1:], b)
