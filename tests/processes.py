"""Helpers for other processes: commands, forks that have imported the trainer, ranks, torchrun."""

import ctypes
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]


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


PRELOADED = ["matplotlib.figure", "torch._dynamo", "triton", "tyro", "fastgpt.train.trainer"]
FORKS = get_context("forkserver")
"""Forks of a process that has imported the trainer, which takes 5 s, and starts no thread."""
FORKS.set_forkserver_preload(PRELOADED)
TAKEN: list[float] = []
"""Core-seconds of forks, which are no children of this process."""
PR_SET_PDEATHSIG = 1


class Job:
    """A fork that calls a function, may be signalled, and may fail.

    With `ranks` it is torchrun's agent, and so many forks of it, the ranks, call the function. They
    begin in a second, where `torchrun` takes 5 s of a core for each.
    """

    def __init__(
        self, ranks: int, function: Callable[..., object], *args: object, cwd: Path = ROOT,
        **environment: str | None,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self.place = Path(self._folder.name)
        self._alive, its = FORKS.Pipe(duplex=False)
        call = (self.place, cwd, changed(environment), its, ranks, function, args)
        self._fork = FORKS.Process(target=_call, args=call)
        self._fork.start()
        its.close()
        self.pid = self._fork.pid or 0

    def said(self, name: str = "out") -> str:
        """Returns what all processes have written so far; `name` is `out` or `err`."""
        path = self.place / name
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

    def ended(self, timeout: float) -> bool:
        """Waits for the end of all processes; says whether it came."""
        return self._alive.poll(timeout)

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        """Waits until all processes have ended; returns the first one's status and both outputs."""
        assert self.ended(timeout), f"not all have ended: {self.said('err')}"
        self._fork.join()
        return self._fork.exitcode or 0, self.said(), self.said("err")

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._fork.kill()  # which may not have its own group yet
        self._fork.join()
        self._folder.cleanup()


def _call(
    folder: Path, cwd: Path, environment: dict[str, str], _alive: Connection, ranks: int,
    function: Callable[..., object], args: tuple,
) -> None:  # fmt: skip
    """Calls a function in a fork; `_alive` closes when the last process that has it has ended."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    for number, name in enumerate(("out", "err"), 1):
        file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    try:
        if ranks:
            _launch(ranks, function, args)
        else:
            function(*args)
    finally:
        (folder / f"seconds-{os.getpid()}").write_text(str(sum(os.times()[:4])))


def _launch(ranks: int, function: Callable[..., object], args: tuple) -> None:
    """Starts ranks, which leave out what takes longer than a tiny run, as the fixture `tiny` does.

    Without the patch torchrun asks for the GPUs, and forks of a process that has asked for them
    cannot use them.
    """
    import torch
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from fastgpt.device import device
    from fastgpt.logs import metrics

    torch.set_num_threads(1)
    metrics.plot_losses = lambda records, path, title: path.touch()
    device.measured_peak = lambda *_: 1e11
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


def forked(
    function: Callable[..., object], *args: object, timeout: float = 600, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Calls a function of a module in a fork; returns its exit status and what it printed."""
    with Job(0, function, *args, **how) as job:
        status, *texts = job.end(timeout)
        TAKEN.extend(float(path.read_text()) for path in job.place.glob("seconds-*"))
    return subprocess.CompletedProcess([], status, *texts)


def script(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a script or, after `-m`, a module with arguments; otherwise as `forked`."""
    return forked(run_script, [*map(str, arguments)], **how)


def run_script(arguments: list[str]) -> None:
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


class Ranks:
    """Ranks of one process group, which call functions, one after the other."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.links, self.job = size, list[Connection](), None

    def __call__(self, function: Callable[..., Any], *args: object, timeout: float = 150) -> list:
        """Calls a function of a module on each rank; returns the results in the ranks' order.

        What it needs beside its arguments is in `os.environ` and torch.distributed. An error on a
        rank ends all, and is raised here with its traceback; the next call starts others.
        """
        if self.job is None:
            pipes = [FORKS.Pipe() for _ in range(self.size)]
            self.links = [ours for ours, _ in pipes]
            self.job = Job(self.size, _serve, [its for _, its in pipes])
            for _, its in pipes:
                its.close()
        try:
            for link in self.links:
                link.send((function, args))
            if not all(link.poll(timeout) for link in self.links):
                raise TimeoutError(f"no answer in {timeout} s")
            results, seconds = zip(*(link.recv() for link in self.links))
        except (EOFError, OSError) as error:
            said = self.job.said("err")
            self.__exit__()
            raise AssertionError(f"{error}\n{said}") from None
        TAKEN.extend(seconds)
        return [*results]

    def train(self, *argvs: list[str], timeout: float = 150) -> str:
        """Trains runs, given by their command lines; returns what all ranks printed."""
        return "".join(self(train_in_turn, argvs, timeout=timeout))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.links:
            link.close()
        if self.job is not None:
            with self.job:
                self.job.ended(5)
        self.job = None


def _serve(links: list[Connection]) -> None:
    """Calls what comes through this rank's link, until its other end closes."""
    from fastgpt.faults.failure import abort_all_ranks

    link = links[int(os.environ["RANK"])]
    with abort_all_ranks(), suppress(EOFError):  # in the end they leave the group together
        while True:
            function, args = link.recv()
            begun = time.process_time()
            link.send((function(*args), time.process_time() - begun))


def train_in_turn(argvs: list[list[str]]) -> str:
    """Trains runs in this process; returns what it printed."""
    from fastgpt.cli import configure
    from fastgpt.train.trainer import Trainer

    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        for argv in argvs:
            Trainer(configure(argv)).fit()
    return printed.getvalue()


def torchrun(
    ranks: int, *argv: str, before: tuple = (), **environment: str
) -> subprocess.Popen[str]:
    """Starts `torchrun --nproc_per_node=RANKS ARGV` in its own session, after the words `before`.

    A free port comes by torchrun's own variables, so that the command is as typed.
    """
    own = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.1:0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *argv]
    return subprocess.Popen(
        [*before, *command], cwd=ROOT, env=os.environ | own | environment, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
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
    found = any(re.search(pattern, line) for line in process.stdout)
    assert found, process.stderr.read()
