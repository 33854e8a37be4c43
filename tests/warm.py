"""A Python that has imported the trainer, and forks for each command: saves 5 s a command.

It is a process of its own, because that of the tests has threads, and Triton's interpreter on. A
command finds the rest of the project in its own folder.
"""

import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("matplotlib.figure", "torch._dynamo", "triton", "tyro"),
    *("fastgpt.cli", "fastgpt.train.trainer"),
)


class Job:
    """A command that runs, with what `subprocess.Popen` has of such a one."""

    def __init__(self, arguments: list[str], pid: int, out: int, err: int, status: int) -> None:
        self.args, self.pid, self.returncode = arguments, pid, None
        self.stdout, self.stderr, self.status = map(os.fdopen, (out, err, status))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self.status.read())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns the rest of both outputs, whose other ends its children may have as well."""
        said: dict[Any, str] = {}
        files = (self.stdout, self.stderr)
        readers = [
            threading.Thread(target=lambda x=x: said.update({x: x.read()}), daemon=True)
            for x in files
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
        if len(said) < len(files):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        for file in (*files, self.status):
            file.close()
        return said[self.stdout], said[self.stderr]


class Warm:
    """Starts `python ARGUMENTS` in forks of one process with these variables; `stop` ends it."""

    def __init__(self, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno())], cwd=ROOT, pass_fds=[its.fileno()],
                env=kept | environment | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def start(self, arguments: list[str], cwd: Path = ROOT, **changed: str | None) -> Job:
        """Runs a script or, after `-m`, a module, in the folder `cwd`; None unsets a variable."""
        environment = {k: v for k, v in (os.environ | changed).items() if v is not None}
        pipes = [os.pipe() for _ in range(3)]
        message = json.dumps([arguments, str(cwd), environment]).encode()
        socket.send_fds(self.socket, [message], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        return Job(arguments, int(self.socket.recv(100)), *(read for read, _ in pipes))

    def run(
        self, *arguments: object, cwd: Path = ROOT, timeout: float = 600, **changed: str | None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        job = self.start([*map(str, arguments)], cwd, **changed)
        out, err = job.communicate(timeout)
        return subprocess.CompletedProcess(job.args, job.wait(), out, err)

    def stop(self) -> None:
        self.socket.close()
        self.process.wait()


@functools.cache
def warm() -> Warm:
    """Returns the one of this process of tests, which ends with it."""
    return Warm()


def stop() -> None:
    if warm.cache_info().currsize:
        warm().stop()


def serve(requests: socket.socket) -> None:
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()
    running: dict[int, int] = {}
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            for pid in [pid for pid in running if os.waitid(os.P_PID, pid, END_OR_NOT)]:
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):  # of a job that nobody waits for
                    os.write(running[pid], str(os.waitstatus_to_exitcode(status)).encode())
                os.close(running.pop(pid))
        if requests in ready:
            message, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
            if not message:
                return
            if not (child := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for file in (requests.fileno(), ended, wake, *running.values(), files[2]):
                    os.close(file)
                arguments, cwd, environment = json.loads(message)
                run_here(arguments, cwd, environment, files[:2])
            running[child] = files[2]
            for file in files[:2]:
                os.close(file)
            requests.send(str(child).encode())


END_OR_NOT = os.WEXITED | os.WNOHANG | os.WNOWAIT


def run_here(arguments: list[str], cwd: str, environment: dict[str, str], files: list[int]) -> None:
    """Runs a command in this process, and ends it; what is registered with atexit is not done."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", closefd=False, encoding=encoding)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    sys.path.insert(0, cwd)
    status: object = 0
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve(socket.socket(fileno=int(sys.argv[1])))
