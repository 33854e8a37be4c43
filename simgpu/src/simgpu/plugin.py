"""The pytest form: `pytest -p simgpu.plugin --simgpu [--simgpu-arch 90] ...`."""

from typing import Any

import pytest

from simgpu import start


def pytest_addoption(parser: Any) -> None:
    """Adds the flags."""
    group = parser.getgroup("simgpu", "simulated CUDA GPUs")
    group.addoption("--simgpu", action="store_true", help="give the tests simulated GPUs")
    group.addoption("--simgpu-arch", type=int, default=90, help="90 for sm_90 (the default), ...")
    group.addoption("--simgpu-gpus", type=int, default=1, help="how many (1)")
    group.addoption("--simgpu-memory", default="2GiB", help="of each (2GiB)")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Starts them before any conftest.py imports torch."""
    asked = early_config.known_args_namespace
    if asked.simgpu:
        try:
            start(asked.simgpu_arch, asked.simgpu_gpus, asked.simgpu_memory)
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from error
