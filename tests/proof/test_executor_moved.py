"""The old names of simgpu's executor: they work for a release, and say which are the new ones."""

import re

import pytest

import simgpu.executor
from fastgpt.kernels.proof import execute
from tests.processes import ROOT, python

YOURS = ROOT / "simgpu" / "tests" / "executor" / "yourfile.py"


def test_the_names_are_those_of_simgpu():
    for name in simgpu.executor.__all__:
        with pytest.warns(DeprecationWarning, match=r"is now simgpu\.executor.* go with 0\.4\.0"):
            assert getattr(execute, name) is getattr(simgpu.executor, name)


@pytest.mark.parametrize(
    ("package", "file", "status", "says"),
    [
        ("kernels", YOURS, 0, "softmax 2x, matmul 1x: no fault"),
        ("fastgpt.kernels", f"{YOURS}:forgotten", 1, "error: softmax: reads 4 bytes outside of"),
        ("kernels", "missing.py", 2, "error: there is no file missing.py"),
    ],
)
def test_the_command_ends_as_before(package, file, status, says):
    done = python("-m", f"{package}.proof.execute", file, "--arch", "80", TRITON_INTERPRET=None)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr
    assert re.search(r"DeprecationWarning: .* is now simgpu\.executor", done.stderr)
