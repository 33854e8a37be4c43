"""Helpers for other processes: commands, forks that have imported the trainer, ranks, torchrun."""

import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# --- commands -------------------------------------------------------------------------------------


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


# --- forks ----------------------------------------------------------------------------------------

FORKS = get_context("forkserver")
"""Forks of a process that has imported the trainer, which takes 5 s, and starts no thread."""
FORKS.set_forkserver_preload(
    ["matplotlib.figure", "torch._dynamo", "triton", "tyro", "fastgpt.train.trainer"]
)


def forked(
    function: Callable[..., object],
    *args: object,
    ranks: int = 0,
    cwd: Path = ROOT,
    timeout: float = 600,
    **environment: str | None,
) -> subprocess.CompletedProcess[str]:
    """Calls a function of a module in a fork; returns its exit status and what it printed.

    Args:
        ranks: if not 0, as many forks, each with the variables of a rank under torchrun; the
            status is the first one that is not 0.
        environment: None unsets a variable.
    """
    changed = {k: v for k, v in (os.environ | environment).items() if v is not None}
    with tempfile.TemporaryDirectory() as folder:
        forks = [
            FORKS.Process(target=_call, args=(folder, cwd, changed | own, function, args))
            for own in (environments(ranks) if ranks else [{}])
        ]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join(timeout)
        texts = [Path(folder, name).read_text() for name in ("out", "err")]
        late = [fork for fork in forks if fork.exitcode is None]
        for fork in late:
            fork.kill()
        assert not late, f"{function} has not ended in {timeout} s: {texts}"
        status = next((fork.exitcode for fork in forks if fork.exitcode), 0)
        return subprocess.CompletedProcess([], status, *texts)


def script(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a script or, after `-m`, a module with arguments; otherwise as `forked`."""
    return forked(_run, [*map(str, arguments)], **how)


def _call(folder: str, cwd: Path, environment: dict[str, str], function: Any, args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    for number, name in enumerate(("out", "err"), 1):
        file = os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    function(*args)


def _run(arguments: list[str]) -> None:
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


# --- ranks ----------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def environments(size: int) -> list[dict[str, str]]:
    """Returns the variables that torchrun sets for each rank."""
    port = str(free_port())
    all_ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    all_ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    return [all_ | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(size)]


class Ranks:
    """Ranks of one process group, which call functions, one after the other."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.links, self.forks = size, list[Connection](), list[Any]()
        self.cpu_seconds = 0.0
        """What the ranks have taken so far."""

    def __call__(self, function: Callable[..., Any], *args: object, timeout: float = 150) -> list:
        """Calls a function of a module on each rank; returns the results in the ranks' order.

        What it needs beside its arguments is in `os.environ` and torch.distributed. An error on a
        rank ends all, and is raised here with its traceback.
        """
        if not self.forks:
            self._start()
        for link in self.links:
            link.send((function, args))
        results, until = dict[int, Any](), time.monotonic() + timeout
        while len(results) < self.size:
            left = [link for rank, link in enumerate(self.links) if rank not in results]
            for link in (ready := wait(left, max(until - time.monotonic(), 0))):
                rank = self.links.index(link)  # pyright: ignore
                try:
                    error, results[rank], seconds = link.recv()  # pyright: ignore
                except EOFError:
                    error, seconds = "it has ended", 0
                self.cpu_seconds += seconds
                if error:
                    self.stop()
                    raise AssertionError(f"rank {rank}: {error}")
            if not ready:
                self.stop()
                raise AssertionError(f"no answer in {timeout} s from a rank but {sorted(results)}")
        return [results[rank] for rank in range(self.size)]

    def train(self, *argvs: list[str], timeout: float = 150) -> str:
        """Trains runs, given by their command lines; returns what all ranks printed."""
        return "".join(self(train_in_turn, argvs, timeout=timeout))

    def _start(self) -> None:
        for own in environments(self.size):
            ours, its = FORKS.Pipe()
            fork = FORKS.Process(target=_serve, args=(its, os.environ | own), daemon=True)
            fork.start()
            its.close()
            self.links.append(ours)
            self.forks.append(fork)

    def stop(self) -> None:
        """Ends the ranks; the next call starts others."""
        for fork in self.forks:
            fork.kill()
            fork.join()
        self.links, self.forks = [], []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _serve(link: Connection, environment: dict[str, str]) -> None:
    """Calls what comes through the link, until its other end closes."""
    from fastgpt.device import device
    from fastgpt.logs import metrics

    os.environ.update(environment)
    metrics.plot_losses = lambda records, path, title: path.touch()  # as the fixture `tiny`
    device.measured_peak = lambda *_: 1e11
    while True:
        try:
            function, args = link.recv()
        except EOFError:
            return
        error, result, begun = None, None, time.process_time()
        try:
            result = function(*args)
        except BaseException:
            error = traceback.format_exc()
        link.send((error, result, time.process_time() - begun))


def train_in_turn(argvs: list[list[str]]) -> str:
    """Trains runs in this process; returns what it printed."""
    from fastgpt.cli import configure
    from fastgpt.train.trainer import Trainer

    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        for argv in argvs:
            Trainer(configure(argv)).fit()
    return printed.getvalue()


# --- torchrun -------------------------------------------------------------------------------------


def torchrun(
    ranks: int, *argv: str, cwd: Path = ROOT, before: tuple = (), **environment: str
) -> subprocess.Popen[str]:
    """Starts `torchrun --nproc_per_node=RANKS ARGV`, with its own port and session.

    The words `before` stand before the command. The port comes through torchrun's own environment
    variable, so that the command is as typed.
    """
    own = {"PET_MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **environment}
    own["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [*before, "torchrun", f"--nproc_per_node={ranks}", *argv],
        cwd=cwd, env=os.environ | own, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 150) -> str:
    """Returns the output of a process that must succeed."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, err
    return out


def read_until(process: Any, pattern: str) -> None:
    """Reads the output's lines up to the first that matches."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return
    raise AssertionError("".join(lines) + process.stderr.read())
