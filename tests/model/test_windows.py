"""Training on Windows, simulated: no make, no Triton, no symbolic links, none of POSIX's calls."""

import shutil
import sys

import pytest

from tests.processes import ROOT, ended

LACKING = """
import builtins, os, runpy, signal, sys

del os.fork, os.killpg, os.getpgid, os.sched_getaffinity, os.O_DIRECTORY
del signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.pthread_sigmask
sys.modules["triton"] = None
imported = builtins.__import__

def without_posix(name, namespace=None, *rest, **options):
    if name in ("fcntl", "pwd", "resource") and "fastgpt" in (namespace or {}).get("__name__", ""):
        raise ModuleNotFoundError(name)
    return imported(name, namespace, *rest, **options)

builtins.__import__ = without_posix
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
print(sys.modules["fastgpt.kernels"].__file__)
"""


@pytest.mark.slow
def test_train_py_runs_where_posix_triton_and_links_are_missing(tiny, tmp_path):
    """Git writes a link as a file that holds its target, unless Windows allows links."""
    ignored = shutil.ignore_patterns("__pycache__", "kernels")
    shutil.copytree(ROOT / "fastgpt", tmp_path / "fastgpt", ignore=ignored)
    (tmp_path / "fastgpt" / "kernels").write_text("../kernels")
    for name in ("kernels", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = ended(sys.executable, "-c", LACKING, *tiny("--steps 2"), cwd=tmp_path, PYTHONPATH="")
    assert "done after step 2" in done.stdout, done.stderr
    assert done.stdout.endswith(f"{tmp_path}/kernels/__init__.py\n")
