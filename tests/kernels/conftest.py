"""Fixtures of all kernel tests; with --execute, the choice of those that run compiled kernels."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.executed import empty_record, execute_and_record


@pytest.fixture(autouse=True)
def products_in_fp32() -> Iterator[None]:
    """Turns TF32 off, as the kernels are compared with products in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    archs = metafunc.config.getoption("execute")
    if archs:
        metafunc.parametrize("executed", archs, indirect=True, ids=lambda arch: f"sm_{arch}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that run no kernel, if the kernels are to be executed."""
    if not config.getoption("execute"):
        return
    here = Path(__file__).parent
    left_out = [x for x in items if here in x.path.parents and not runs_kernels(x)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def runs_kernels(item: pytest.Item) -> bool:
    """Returns True if a test runs kernels: on its `device`, or those that it is given."""
    fixtures = set(getattr(item, "fixturenames", ()))
    chosen = getattr(item, "callspec", None)
    plain = "plain" in fixtures or (chosen and chosen.params.get("kernels") == "plain")
    return not plain and not fixtures.isdisjoint({"device", "kernels"})


@pytest.fixture(autouse=True)
def executed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --execute, launches run the PTX that is compiled for an arch."""
    arch = getattr(request, "param", None)
    if arch is None:
        yield
        return
    # not at the top: whether the interpreter runs is settled after this file is imported
    from fastgpt.kernels import runtime

    record = empty_record(arch)
    request.node.user_properties.append(("executed", record))
    with runtime.executing(arch, partial(execute_and_record, record=record)):
        yield
