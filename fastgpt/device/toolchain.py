"""Compilers and headers that torch.compile and Triton need; this module imports no torch."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def has_compiler() -> bool:
    """Returns True if torch.compile finds a C++ compiler."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))


def missing_for_triton() -> str:
    """Names what Triton's kernels lack to run here; empty if nothing.

    Triton builds their launchers in C when they first run, and looks for the compiler and for
    Python.h where this function does (triton/runtime/build.py).
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it is not made for Windows)"
    given = os.environ.get("CC")
    if not any(map(shutil.which, ["gcc", "clang"] if given is None else [given])):
        where = "CC, gcc, clang" if given is None else f"CC is {given}"
        return f"no C compiler was found ({where}): install gcc (apt install gcc)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if not header.exists():
        python = f"python{sysconfig.get_python_version()}"
        return f"{header} is missing: install it (apt install {python}-dev, dnf: {python}-devel)"
    return ""
