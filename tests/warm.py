"""A Python that has imported torch already, and forks for each command: saves seconds a command.

It is a process of its own, because that of the tests has threads, and Triton's interpreter on. It
imports nothing of the project, which a command finds in its own folder.
"""

import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

IMPORTED = ("matplotlib.figure", "torch._dynamo", "torch.utils.tensorboard", "triton", "tyro")


class Warm:
    """Runs `python ARGUMENTS` in forks of one process; `stop` ends it."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs a script or, after `-m`, a module, to its end in the folder `cwd`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([arguments, str(cwd)]) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        out, err = ((cwd / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, status, out, err)

    def stop(self) -> None:
        self.process.communicate()


def serve() -> None:
    del sys.path[0]  # this folder
    for name in IMPORTED:
        __import__(name)
    for line in sys.stdin:
        arguments, cwd = json.loads(line)
        if not (child := os.fork()):
            run_here(arguments, cwd)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run_here(arguments: list[str], cwd: str) -> None:
    """Runs a command in this process, and ends it as Python would."""
    os.chdir(cwd)
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
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
    serve()
