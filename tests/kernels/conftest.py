"""What the tests of all kernels stand on."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def products_in_fp32() -> Iterator[None]:
    """What kernels are compared with must not multiply in TF32, whatever was set before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
