"""Helpers that run Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(*arguments: object, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments at the root of the repository; None unsets a variable."""
    changed = {k: v for k, v in (os.environ | environment).items() if v is not None}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT, env=changed, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def printed_by(script: str, **environment: str) -> str:
    """Returns the output of a script that must succeed; Triton compiles in it."""
    done = python("-c", script, TRITON_INTERPRET=None, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
