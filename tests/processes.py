"""Helpers that run Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ended(
    *command: object, cwd: Path = ROOT, timeout: float | None = 600, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in seconds at most `timeout`; None unsets a variable."""
    changed = {k: v for k, v in (os.environ | environment).items() if v is not None}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=changed, timeout=timeout,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip


def python(*arguments: object, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments at the root of the repository; None unsets a variable."""
    return ended(sys.executable, *arguments, **environment)


def printed_by(script: str, *arguments: object, **environment: str) -> str:
    """Returns the output of a script that must succeed; Triton compiles in it."""
    done = python("-c", script, *arguments, TRITON_INTERPRET=None, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
