"""Tests of bias and activation on a GPU; `test_conformance` has those of every op."""

import pytest

from fastgpt.kernels import bias_act
from tests.kernels.cuda.proof import assert_right_beyond_32_bits, one_at_a_time
from tests.parity import awkward

pytestmark = pytest.mark.gpu


@one_at_a_time
def test_more_than_two_billion_elements():
    bias = awkward(2048, device="cuda")
    assert_right_beyond_32_bits(lambda *x: bias_act(*x, "swiglu"), 2048, 1024, bias)
