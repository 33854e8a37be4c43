"""Helpers for other processes: commands, forks that have imported the trainer, ranks, torchrun."""

import ctypes
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
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]

# --- commands -------------------------------------------------------------------------------------


def changed(environment: dict[str, str | None]) -> dict[str, str]:
    return {k: v for k, v in (os.environ | environment).items() if v is not None}


def ended(
    *command: object, cwd: Path = ROOT, timeout: float | None = 600, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in seconds at most `timeout`; None unsets a variable."""
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=changed(environment), timeout=timeout,
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
TAKEN: list[float] = []
"""Core-seconds of forks, which are no children of this process."""


def forked(
    function: Callable[..., object], *args: object, cwd: Path = ROOT, timeout: float = 600,
    **environment: str | None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Calls a function of a module in a fork; returns its exit status and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        call = (folder, cwd, changed(environment), function, args)
        fork = FORKS.Process(target=_call, args=call)
        fork.start()
        fork.join(timeout)
        fork.kill()
        texts = [Path(folder, name).read_text() for name in ("out", "err")]
        TAKEN.extend(float(path.read_text()) for path in Path(folder).glob("seconds-*"))
        assert (fork.exitcode or 0) >= 0, f"{function}: {fork.exitcode}, {texts}"
        return subprocess.CompletedProcess([], fork.exitcode or 0, *texts)


def script(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a script or, after `-m`, a module with arguments; otherwise as `forked`."""
    return forked(run_script, [*map(str, arguments)], **how)


def _call(folder: str, cwd: Path, environment: dict[str, str], function: Any, args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    for number, name in enumerate(("out", "err"), 1):
        file = os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    try:
        function(*args)
    finally:
        Path(folder, f"seconds-{os.getpid()}").write_text(str(sum(os.times()[:4])))


def run_script(arguments: list[str]) -> None:
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
                TAKEN.append(seconds)
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

    def stop(self, seconds: float = 0) -> None:
        """Ends the ranks, in so many seconds by themselves; the next call starts others."""
        for link in self.links:
            link.close()
        for fork in self.forks:
            fork.join(seconds)
        for fork in self.forks:
            fork.kill()
            fork.join()
        self.links, self.forks = [], []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(5)


def _serve(link: Connection, environment: dict[str, str]) -> None:
    """Calls what comes through the link, until its other end closes."""
    from fastgpt.faults.failure import abort_all_ranks

    os.environ.update(environment)
    _cheapen()
    with abort_all_ranks():  # in the end they leave the group together
        while True:
            try:
                function, args = link.recv()
            except EOFError:
                break
            error, result, begun = None, None, time.process_time()
            try:
                result = function(*args)
            except BaseException:
                error = traceback.format_exc()
            link.send((error, result, time.process_time() - begun))


def _cheapen() -> None:
    """Leaves out what takes longer than a tiny run, as the fixture `tiny` does."""
    import torch

    from fastgpt.device import device
    from fastgpt.logs import metrics

    torch.set_num_threads(1)
    metrics.plot_losses = lambda records, path, title: path.touch()
    device.measured_peak = lambda *_: 1e11


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


# --- torchrun's agent in a fork -------------------------------------------------------------------


class Job:
    """torchrun's agent and its ranks, which call a function, may be signalled, and may fail.

    All are forks of a process that has imported the trainer: they begin in a second, where
    `torchrun` takes 5 s of a core for each.
    """

    def __init__(
        self, ranks: int, function: Callable[..., object], *args: object, **environment: str | None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ended, its = FORKS.Pipe(duplex=False)
        how = (its, ranks, function, args)
        call = (self._folder.name, ROOT, changed({"OMP_NUM_THREADS": "1"} | environment), _launch)
        self._agent = FORKS.Process(target=_call, args=(*call, how))
        self._agent.start()
        its.close()
        self.pid = self._agent.pid or 0

    def said(self, name: str = "out") -> str:
        """Returns what all processes have written so far; `name` is `out` or `err`."""
        path = Path(self._folder.name, name)
        return path.read_text() if path.exists() else ""

    def wait_for(self, pattern: str, timeout: float = 60) -> None:
        """Waits until a line of the output matches."""
        until = time.monotonic() + timeout
        while not re.search(pattern, self.said(), re.MULTILINE):
            assert time.monotonic() < until, self.said() + self.said("err")
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """Lists the process ids of the ranks, in their order."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [*map(int, children.split())]

    def end(self, timeout: float = 60) -> tuple[int | None, str, str]:
        """Waits until all processes have ended; returns the agent's status and both outputs."""
        assert self._ended.poll(timeout), f"not all have ended: {self.said('err')}"
        self._agent.join(timeout)
        return self._agent.exitcode, self.said(), self.said("err")

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._agent.kill()  # which may not have its own group yet
        self._agent.join()
        self._folder.cleanup()


def _launch(_alive: Connection, ranks: int, function: Callable, args: tuple) -> None:
    """Starts the ranks; `_alive` closes when the last process has ended."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    _cheapen()
    # It asks for the GPUs, and a process that has asked for them has forks that cannot use them.
    with mock.patch("torch.cuda.is_available", return_value=False):
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", run_id="job",
            rdzv_endpoint="127.0.0.1:0", start_method="fork", max_restarts=0,
        )  # fmt: skip
    elastic_launch(config, _rank)(os.getpid(), function, args)


def _rank(agent: int, function: Callable[..., object], args: tuple) -> None:
    """Calls a function; torchrun's own ranks get no signal when it ends, nor wait for it then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    function(*args)
    if os.getppid() != agent:
        os._exit(0)


PR_SET_PDEATHSIG = 1
