"""The pytest form: `pytest -p simgpu.plugin --simgpu [--simgpu-arch 90] ...`."""

import json
from pathlib import Path
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
    text = "file to which a line of JSON is added for each test"
    group.addoption("--simgpu-record", metavar="FILE", type=Path, help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Starts them before any conftest.py imports torch."""
    asked = early_config.known_args_namespace
    if asked.simgpu:
        try:
            start(asked.simgpu_arch, asked.simgpu_gpus, asked.simgpu_memory)
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_configure(config: Any) -> None:
    """Registers the record, in the process that hears of all tests."""
    path = config.getoption("simgpu_record")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(path, config.getoption("simgpu_arch")))


class Record:
    """Adds the outcome of each test to a file, as soon as it is known."""

    def __init__(self, path: Path, arch: int) -> None:
        self.path, self.arch = path, arch

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        row = {"arch": self.arch, "test": report.nodeid, "outcome": report.outcome}
        row["seconds"] = round(report.duration, 1)
        if report.skipped:
            row["reason"] = report.longrepr[2]
        elif report.failed:
            row["reason"] = str(report.longrepr).strip().splitlines()[-1][:200]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
