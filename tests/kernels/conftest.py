"""Fixtures of all kernel tests; with --execute, the choice of those that run compiled kernels."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

AROUND_KERNELS = {
    "a_second_derivative_raises", "bad_arguments_are_named", "checkpointing_changes_nothing",
    "compiles_once", "fake_tensors_need_no_kernel", "opcheck_passes",
    "the_reference_is_pytorchs_own", "the_reference_runs_where_kernels_do_not",
}  # fmt: skip
"""Conformance checks of the Python code that surrounds an op's kernels."""


@pytest.fixture(autouse=True)
def products_in_fp32() -> Iterator[None]:
    """Turns TF32 off, as the kernels are compared with products in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if archs := metafunc.config.getoption("execute"):
        metafunc.parametrize("executed", archs, indirect=True, ids=lambda arch: f"sm_{arch}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of other ops than --op, and with --execute what shows nothing of kernels."""
    left_out = []
    op, compiled = config.getoption("op"), config.getoption("execute")
    specs = import_module(f"fastgpt.kernels.{op}.spec").SPECS if op else ()
    named = {spec.name: spec for spec in specs}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        kept = (not op or is_of(named, params)) and (not compiled or shows_kernels(item, params))
        if Path(__file__).parent in item.path.parents and not kept:
            left_out.append(item)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def is_of(specs: Mapping[str, Any], params: dict[str, Any]) -> bool:
    """Returns True for the conformance tests of these ops, each check on one problem alone."""
    spec = specs.get(params.get("name", ""))
    return spec is not None and ("check" not in params or params["label"] == spec.structural[0])


def shows_kernels(item: pytest.Item, params: dict[str, Any]) -> bool:
    """Returns True if a test runs kernels, on its `device` or as its `kernels`, and checks them."""
    fixtures = set(getattr(item, "fixturenames", ()))
    if "plain" in fixtures or params.get("kernels") == "plain":
        return False
    if getattr(params.get("check"), "__name__", "") in AROUND_KERNELS:
        return False
    return not fixtures.isdisjoint({"device", "kernels"})


@pytest.fixture(autouse=True)
def executed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --execute, launches run the PTX that is compiled for an arch."""
    arch = getattr(request, "param", None)
    if arch is None:
        yield
        return
    # not at the top: whether the interpreter runs is settled after this file is imported
    from fastgpt.kernels import runtime
    from fastgpt.kernels.proof.fenced import execute

    counted = {"arch": arch, "launches": 0}
    request.node.user_properties.append(("executed", counted))

    def run(launch: Any) -> None:
        counted["launches"] += 1
        execute(launch, arch)

    with runtime.executing(arch, run):
        yield
