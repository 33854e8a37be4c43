"""Tests of LayerNorm and RMSNorm on a GPU; `test_conformance` has those of every op."""

import pytest
import torch

from fastgpt.kernels import layer_norm
from fastgpt.kernels.norm.spec import SPECS
from tests.kernels import conformance
from tests.kernels.cuda.proof import assert_right_beyond_32_bits, one_at_a_time
from tests.parity import awkward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_many_narrow_rows(spec, dtype):
    conformance.parity(spec, {"M": 100_001, "N": 64}, "cuda", dtype)


@one_at_a_time
def test_more_than_two_billion_elements():
    weight, bias = (awkward(768, device="cuda") for _ in range(2))
    assert_right_beyond_32_bits(layer_norm, 768, 768, weight, bias)
