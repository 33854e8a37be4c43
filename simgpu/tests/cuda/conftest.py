"""Runs snippets and programs on simulated GPUs, each in a process of its own."""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest

from simgpu import environment
from simgpu.__main__ import arguments
from tests.processes import Job, ended, run_script, script

Run = Callable[..., str]


@functools.cache
def start_forks() -> None:
    """Starts a process that imports PyTorch for simulated GPUs, whose forks choose their own."""
    with mock.patch.dict(os.environ, environment()):
        os.environ.pop("TRITON_INTERPRET", None)
        forkserver.ensure_running()


def _environment(asked: argparse.Namespace) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "TRITON_INTERPRET"))}
    own = environment(asked.arch, asked.gpus, asked.memory, asked.fail)
    return {**kept, **own, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@pytest.fixture
def simulated(tmp_path: Path) -> Run:
    """Runs `python -m simgpu FLAGS PROGRAM`; a program with a line break is Python's text.

    It is a fork that has imported PyTorch, one for each of the `ranks`, or with `cold` the command
    itself.
    """

    def run(
        program: str, *args: str, flags: str = "", status: int = 0, cold: bool = False,
        ranks: int = 0,
    ) -> str:  # fmt: skip
        if "\n" in program:
            path = tmp_path / "snippet.py"
            path.write_text(program)
            program = str(path)
        command = [*flags.split(), program, *args]
        asked = arguments(command)
        own = _environment(asked)
        own |= dict.fromkeys(os.environ.keys() - own)
        if cold:
            command = [sys.executable, "-m", "simgpu", *command]
            done = ended(*command, timeout=1200, **own)
        else:
            start_forks()
            command = [*(["-m"] if asked.module else []), *asked.program]
            if ranks:
                with Job(ranks, run_script, command, **own) as job:
                    ended_with, *said = job.end(1200)
                assert ended_with == status, "".join(said)
                return "".join(said)
            done = script(*command, timeout=1200, **own)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
