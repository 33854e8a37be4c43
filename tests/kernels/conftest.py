"""Fixtures of all kernel tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def products_in_fp32() -> Iterator[None]:
    """Turns TF32 off, as the kernels are compared with products in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
