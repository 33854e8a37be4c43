"""Importing simgpu or its executor imports neither torch nor Triton, and starts no GPU."""

import subprocess
import sys

SCRIPT = """
import os, sys
import simgpu, simgpu.plugin, simgpu.executor
simgpu._after_torch()  # as `import torch` calls it
assert not {"torch", "triton", "simgpu.operators", "simgpu.build"} & {*sys.modules}
assert "SIMGPU" not in os.environ
"""


def test_nothing_is_started_that_was_not_asked_for():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
