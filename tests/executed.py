"""Counts tests whose kernels ran as compiled code without a GPU (`--execute`)."""

from typing import Any

import pytest

PROVES = """\
proved for these inputs: addresses, masks, layouts, rounding, barriers, waits and bounds of the PTX
not proved: the machine code that ptxas makes of it, last bits of exp2, rsqrt and of the tensor
cores' sums, time"""


class Counter:
    """Counts launches of tests in any process, and says at the end what they prove."""

    def __init__(self) -> None:
        self.tests = self.launches = 0
        self.archs: set[int] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        executed: Any = dict(report.user_properties).get("executed")
        if report.when == "call" and executed:
            self.tests += 1
            self.launches += executed["launches"]
            self.archs.add(executed["arch"])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        archs = ", ".join(f"sm_{arch}" for arch in sorted(self.archs))
        terminalreporter.write_line(
            f"executed for {archs}: {self.tests:,} tests, {self.launches:,} launches\n{PROVES}"
        )
