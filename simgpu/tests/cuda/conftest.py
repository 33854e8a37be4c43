"""Runs snippets and programs on simulated GPUs, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
Run = Callable[..., str]


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "TRITON_INTERPRET"))}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture
def simulated(tmp_path: Path) -> Run:
    """Runs `python -m simgpu FLAGS PROGRAM`; a program with a line break is Python's text."""

    def run(program: str, *args: str, flags: str = "", status: int = 0) -> str:
        if "\n" in program:
            path = tmp_path / "snippet.py"
            path.write_text(program)
            program = str(path)
        command = [sys.executable, "-m", "simgpu", *flags.split(), program, *args]
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), text=True, capture_output=True, timeout=1200
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
