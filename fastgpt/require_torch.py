"""Check that this Python has torch, which imports nothing that may be missing."""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
STARTED = os.getpid(), os.getppid()
"""This process and its parent, before imports that take seconds, in which the parent may end."""


def require_torch() -> None:
    """Exits with one line that names this Python, and the one to use, if torch is missing."""
    if find_spec("torch") is None:
        version = ".".join(map(str, sys.version_info[:3]))
        has = f"{sys.executable} (Python {version}) has no torch"
        sys.exit(f"error: {has}; run {repaired()}")


def repaired() -> str:
    """Returns what to run in place of this command, where packages are missing or damaged."""
    arguments = getattr(sys, "orig_argv", [sys.executable, *sys.argv])[1:]
    python = min(str(VENV_PYTHON), os.path.relpath(VENV_PYTHON), key=len)
    usable = VENV_PYTHON.exists() and Path(sys.executable) != VENV_PYTHON
    first = "" if usable else f"`make setup` in {ROOT}, then "
    return first + shlex.join([python, *arguments])
