"""Runs snippets and programs on simulated GPUs, each in a process of its own."""

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simgpu import environment
from simgpu.__main__ import arguments
from tests.warm import Warm

ROOT = Path(__file__).parents[3]
Run = Callable[..., str]


@functools.cache
def warm() -> Warm:
    """A process that has imported PyTorch for simulated GPUs, whose forks choose their own."""
    return Warm(**environment())


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(lambda: warm.cache_info().currsize and warm().stop())


def _environment(asked: argparse.Namespace) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "TRITON_INTERPRET"))}
    own = environment(asked.arch, asked.gpus, asked.memory, asked.fail)
    return {**kept, **own, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture
def simulated(tmp_path: Path) -> Run:
    """Runs `python -m simgpu FLAGS PROGRAM`; a program with a line break is Python's text.

    It is a fork that has imported PyTorch, or with `cold` the command itself.
    """

    def run(program: str, *args: str, flags: str = "", status: int = 0, cold: bool = False) -> str:
        if "\n" in program:
            path = tmp_path / "snippet.py"
            path.write_text(program)
            program = str(path)
        command = [*flags.split(), program, *args]
        asked = arguments(command)
        own = _environment(asked)
        if cold:
            command = [sys.executable, "-m", "simgpu", *command]
            done = subprocess.run(
                command, cwd=ROOT, env=own, text=True, capture_output=True, timeout=1200
            )
        else:
            command = [*(["-m"] if asked.module else []), *asked.program]
            gone = dict.fromkeys(os.environ.keys() - own)
            done = warm().run(*command, timeout=1200, **own, **gone)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
