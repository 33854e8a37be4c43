"""The check that this Python has torch. It must import nothing that may be missing."""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

VENV_PYTHON = Path(__file__).parents[1] / ".venv" / "bin" / "python"


def require_torch() -> None:
    """Exits with one line that names this Python, and the one to use, if torch is missing."""
    if find_spec("torch") is not None:
        return
    arguments = getattr(sys, "orig_argv", [sys.executable, *sys.argv])[1:]
    command = shlex.join([os.path.relpath(VENV_PYTHON), *arguments])
    usable = VENV_PYTHON.exists() and Path(sys.executable) != VENV_PYTHON
    first = "" if usable else "`make setup`, then "
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"error: {sys.executable} (Python {version}) has no torch; run {first}{command}")
