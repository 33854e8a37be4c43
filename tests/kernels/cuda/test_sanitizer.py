"""NVIDIA's compute-sanitizer over every op at the small problems of its `Spec`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastgpt.kernels.specs import SPECS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPT = """
import sys
import torch
from fastgpt.kernels.specs import SPECS
from tests.kernels import conformance

spec = SPECS[sys.argv[1]]
for problem in spec.problems.values():
    inputs = conformance.make_inputs(spec, problem, "cuda", torch.float16)
    conformance.run(spec, spec.call(spec.op, problem, "cuda"), conformance.plain(inputs))
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.random])
def test_compute_sanitizer_finds_nothing(name, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit on PATH")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SCRIPT, name],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
        # each buffer an allocation of its own: what is read beyond it is seen
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
