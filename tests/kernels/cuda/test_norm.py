"""Tests of LayerNorm and RMSNorm on a GPU; `test_conformance` has those of every op."""

import pytest
import torch

from fastgpt.kernels import layer_norm
from fastgpt.kernels.norm.spec import SPECS
from tests.kernels import conformance
from tests.kernels.cuda.proof import need, one_at_a_time
from tests.parity import awkward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_many_narrow_rows(spec, dtype):
    conformance.parity(spec, {"M": 100_001, "N": 64}, "cuda", dtype)


@one_at_a_time
def test_more_than_two_billion_elements():
    N = 768
    M = 2**31 // N + 1000
    need(40)
    x = torch.empty(M, N, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    weight, bias = (awkward(N, device="cuda").requires_grad_() for _ in range(2))
    tail = slice(M - 1000, M)  # every element of it lies beyond 2**31
    dy = torch.zeros(M, N, dtype=torch.bfloat16, device="cuda")
    dy[tail] = awkward(1000, N, dtype=torch.bfloat16, device="cuda")
    y = layer_norm(x, weight, bias)
    got = torch.autograd.grad(y, (x, weight, bias), dy)
    last = x.detach()[tail].clone().requires_grad_()
    y_last = layer_norm(last, weight, bias)
    want = torch.autograd.grad(y_last, (last, weight, bias), dy[tail])
    assert torch.equal(y[tail], y_last)
    assert torch.equal(got[0][tail], want[0])
    assert (got[0][:-1000] == 0).all()
    for a, b in zip(got[1:], want[1:], strict=True):  # summed over other programs
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
