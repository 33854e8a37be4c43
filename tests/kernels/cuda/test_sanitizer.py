"""NVIDIA's compute-sanitizer over every op at the small problems of its `Spec`."""

import shutil
import sys

import pytest

from fastgpt.kernels.specs import SPECS
from tests.processes import ended

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
    check = (sanitizer, "--tool", tool, "--error-exitcode", "9")
    # each buffer an allocation of its own: what is read beyond it is seen
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = ended(*check, sys.executable, "-c", SCRIPT, name, timeout=None, **alone)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
