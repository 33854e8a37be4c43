"""The tests themselves where there is CUDA: all that need none run as on a machine without."""

import pytest

from tests.processes import python

# what is seen without the variable, as on a machine with a GPU
MAIN = """
import os, sys
import pytest, torch
torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
sys.exit(pytest.main(["-p", "tests.conftest", "-c", "/dev/null", "-q", "-rs", *sys.argv[1:]]))
"""
TESTS = """
from pytest import mark
def state(device):
    from fastgpt.kernels.runtime import INTERPRETING
    return device, INTERPRETING
def test_plain(device): assert state(device) == ("cpu", True)
@mark.gpu
def test_gpu(device): assert state(device) == ("cuda", False)
"""


@pytest.mark.parametrize(
    ("marked", "said"),
    [("not slow", "1 passed, 1 skipped"), ("gpu and not slow", "1 passed, 1 deselected")],
)
def test_kernels_are_interpreted_unless_cuda_is_asked_for(tmp_path, marked, said):
    (tmp_path / "test_some.py").write_text(TESTS)
    unset = {"CUDA_VISIBLE_DEVICES": None, "TRITON_INTERPRET": None, "PYTEST_XDIST_WORKER": None}
    done = python("-c", MAIN, "-m", marked, "--rootdir", tmp_path, tmp_path, **unset)
    assert said in done.stdout, done.stdout + done.stderr
