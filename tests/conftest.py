"""What every test stands on: a device, a seed, and a cache that is not the user's."""

import os
import random
import tempfile

import numpy as np
import pytest
import torch

IN_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    if IN_XDIST_WORKER:
        # Workers share the cores among them already; the variable reaches what the tests start.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        return
    # Set here and not in a fixture: modules are imported, and workers started, before any fixture.
    cache = tempfile.TemporaryDirectory(prefix="fastgpt-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["FASTGPT_CACHE"] = cache.name


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA, and torch sees no such device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line("no test was selected: nothing was checked, which is a failure")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers whichever tests ran before, and in whichever worker."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
