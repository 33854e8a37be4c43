"""Tests of bias and activation on a GPU; `test_conformance` has those of every op."""

import pytest
import torch

from fastgpt.kernels import bias_act
from tests.kernels.cuda.proof import need, one_at_a_time
from tests.parity import awkward

pytestmark = pytest.mark.gpu


@one_at_a_time
def test_more_than_two_billion_elements():
    N = 1024
    M = 2**31 // N + 1000
    need(40)
    x = torch.empty(M, 2 * N, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    bias = awkward(2 * N, device="cuda").requires_grad_()
    tail = slice(M - 1000, M)  # every element of it lies beyond 2**31, in x and in y
    dy = torch.zeros(M, N, dtype=torch.bfloat16, device="cuda")
    dy[tail] = awkward(1000, N, dtype=torch.bfloat16, device="cuda")
    y = bias_act(x, bias, "swiglu")
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    last = x.detach()[tail].clone().requires_grad_()
    y_last = bias_act(last, bias, "swiglu")
    dlast, dbias_last = torch.autograd.grad(y_last, (last, bias), dy[tail])
    assert torch.equal(y[tail], y_last)
    assert torch.equal(dx[tail], dlast)
    assert (dx[:-1000] == 0).all()
    torch.testing.assert_close(dbias, dbias_last, rtol=1e-4, atol=1e-4)  # by other programs
