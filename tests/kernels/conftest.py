"""Fixtures of all kernel tests."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fastgpt.kernels import runtime


@pytest.fixture(autouse=True)
def products_in_fp32() -> Iterator[None]:
    """Turns TF32 off, as the kernels are compared with products in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(autouse=True)
def executed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --execute, launches run the PTX that is compiled for its arch."""
    arch = request.config.getoption("execute")
    if arch is None:
        yield
        return
    from fastgpt.kernels.proof.execute import execute

    with runtime.executing(arch, partial(execute, arch=arch)):
        yield
