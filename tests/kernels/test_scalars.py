"""Float scalars of the ops: Inductor types those of a Triton kernel that it sees as fp64."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fastgpt import kernels


@pytest.mark.slow
@pytest.mark.every_change
def test_inductor_sees_opaque_ops_and_no_fp64(device):
    """It calls the ops by name, with their floats as literals, and generates no code of ours."""

    def f(q, k, v, x, weight, bias, targets):
        y = kernels.attention(q, k, v, scale=0.3) * 0.7
        x = kernels.bias_act(kernels.layer_norm(x, weight, bias, 1e-5), bias, "gelu_tanh")
        loss = kernels.cross_entropy(x * 1.1, targets, z_loss=0.1, softcap=20.0)
        return loss + y.sum()

    q, k, v = (torch.randn(1, 8, 2, 16, device=device) for _ in range(3))
    x, weight, bias = (torch.randn(*size, device=device) for size in ((4, 32), (32,), (32,)))
    targets = torch.tensor([1, 2, 3, 4], device=device)
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(f), q, k, v, x, weight, bias, targets)
    code = "\n".join(codes)
    called = set(re.findall(r"torch\.ops\.fastgpt\w*\.(\w+)", code))
    assert len(called) == 4, called
    assert "float64" not in code
    assert "fp64" not in code
    assert "_attention_fwd_kernel" not in code
