"""Core-seconds of each suite of tests, which may not grow beyond a budget."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests import processes

BUDGETS = {"unit": 330, "kernels": 520, "ranks": 150, "cli": 230, "faults": 40}
"""Core-seconds that the tests of a suite may take, but for those marked slow: three times what two
quiet cores with fast bf16 need. Over it the run fails: a suite that grows drops something."""
FOLDERS = {
    "kernels": "kernels cuda proof execute executor",
    "ranks": "parallel",
    "faults": "faults guards",
    "cli": "bench cli config logs report serve tests",
}
LAST = pytest.StashKey[float]()


def suite_of(item: pytest.Item) -> str:
    folder = "parallel" if "ranks" in getattr(item, "fixturenames", ()) else item.path.parent.name
    return next((suite for suite, names in FOLDERS.items() if folder in names.split()), "unit")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Notes what this process, its children and its forks have taken since the last report."""
    report = yield
    now = sum(os.times()[:4]) + sum(processes.TAKEN)
    if not item.get_closest_marker("slow"):
        seconds = now - item.config.stash.get(LAST, now)
        report.user_properties = [*report.user_properties, (suite_of(item), seconds)]
    item.config.stash[LAST] = now
    return report


class Sums:
    """Adds up the core-seconds of all processes of tests."""

    def __init__(self) -> None:
        self.by_test = {suite: Counter[str]() for suite in BUDGETS}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name in BUDGETS:
                self.by_test[name][report.nodeid] += value  # pyright: ignore

    def over(self) -> list[str]:
        return [x for x, tests in self.by_test.items() if tests.total() > BUDGETS[x]]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.over() and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        sums = [f"{x} {tests.total():.0f} of {BUDGETS[x]}" for x, tests in self.by_test.items()]
        terminalreporter.write_line(f"core-seconds: {', '.join(sums)}")
        for suite in self.over():
            terminalreporter.write_line(f"{suite} is over its budget; its ten slowest tests:")
            for test, seconds in self.by_test[suite].most_common(10):
                terminalreporter.write_line(f"{seconds:8.1f} {test}")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Sums())
