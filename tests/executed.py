"""Record of tests whose kernels ran as compiled code without a GPU (`--execute`)."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PROVES = """\
proved for these inputs: addresses, masks, layouts, rounding, barriers, waits and bounds of the PTX
not proved: the machine code that ptxas makes of it, last bits of exp2, rsqrt and of the tensor
cores' sums, time"""


Record = dict[str, Any]


def empty_record(arch: int) -> Record:
    """Returns the record of a test that has executed nothing yet."""
    return {"arch": arch, "cases": []}


def execute_and_record(launch: Any, record: Record) -> None:
    """Executes a launch; notes a hash of its code and inputs."""
    from fastgpt.kernels.proof.fenced import compile_launch, execute

    tensors = [x for x in launch.args if isinstance(x, torch.Tensor)]
    before = [digest(x) for x in tensors]
    execute(launch, record["arch"])
    # what the kernel wrote may have been memory that nobody filled
    inputs = [old for old, x in zip(before, tensors) if digest(x) == old]
    numbers = [x for x in launch.args if not isinstance(x, torch.Tensor)]
    code = without_names(compile_launch(launch, record["arch"]).ptx)
    case = repr((code, launch.grid, numbers, inputs))
    record["cases"].append(hashlib.sha256(case.encode()).hexdigest()[:12])


def digest(x: torch.Tensor) -> str:
    """Hashes a tensor's numbers."""
    whole = x.detach().flatten().clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()


def without_names(ptx: str) -> str:
    """Removes from PTX what names its arch or places in the source."""
    code = ptx.partition(".section")[0]
    code = re.sub(r"^\s*\.(target|version|loc|file)\b.*$|//.*$", "", code, flags=re.M)
    return re.sub(r"\s*\n\s*", "\n", code)


class Recorder:
    """pytest plugin that counts what was executed, writes the record and says what it proves."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        self.tests = self.launches = 0
        self.seen: set[str] = set()
        self.archs: set[int] = set()
        if self.path:
            self.path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        executed = dict(report.user_properties).get("executed")
        if report.when != "call" or not isinstance(executed, dict):
            return
        cases = executed["cases"]
        new = set(cases) - self.seen
        self.seen |= new
        self.tests += 1
        self.launches += len(cases)
        self.archs.add(executed["arch"])
        if self.path:
            import triton

            row = {"test": report.nodeid.removeprefix("tests/"), "triton": triton.__version__}
            row |= {**executed, "cases": len(cases), "new": len(new)}
            row |= {"seconds": round(report.duration, 2), "outcome": report.outcome}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        archs = ", ".join(f"sm_{arch}" for arch in sorted(self.archs))
        terminalreporter.write_line(
            f"executed for {archs}: {self.tests:,} tests, {self.launches:,} launches, "
            f"{len(self.seen):,} distinct (by code and inputs)\n{PROVES}"
        )
