"""Functions called in a child process, with limits of time and memory.

Chat templates and tokenizers of others are small programs: loops, regular expressions and
replacements. A child process runs them, so that one without end harms nothing. It is started by the
first call, stays for the next ones, and imports what the functions need, so never torch. Time is
limited on Linux and macOS, memory on Linux only.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from fastgpt.errors import UserError

SECONDS, MEMORY = 1.0, 2**28
"""Seconds of CPU time and bytes of memory that a call may take; each MiB of arguments adds a second
and 256 MiB."""
LONGEST = 2**24
"""Characters of the longest result."""
_lock = Lock()


def call(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Returns the result of a function of a module, called in the child process.

    Args:
        what: subject of the error, such as "the chat template".
        given: its arguments, which are sent as JSON, as is the result.

    Raises:
        RuntimeError: the function raised an error, of which the first line is left.
        UserError: it took too much time or memory.
    """
    each = 1 + len(json.dumps(given)) / 2**20
    seconds, memory = SECONDS * each, int(MEMORY * each)
    request = function.__module__, function.__name__, given, seconds, memory
    with _lock:
        child, reply = _child(os.getpid()), ""
        assert child.stdout is not None
        try:
            with suppress(OSError):  # it has ended
                print(json.dumps(request), file=child.stdin, flush=True)
            reply = child.stdout.readline()
        finally:
            if not reply:  # or Ctrl-C: the next call would get this one's reply
                _child.cache_clear()
                child.kill()
                with suppress(OSError), child:
                    pass
    if not reply:
        raise UserError(f"{what} takes more than {seconds:.2g} s or {memory >> 20} MiB of memory")
    value, error = json.loads(reply)
    if error is not None:
        raise RuntimeError(error)
    return value


@cache
def _child(_: int) -> subprocess.Popen[str]:
    """Starts the child of a process, by its id: after a fork there is none."""
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fastgpt.sandbox"], env=os.environ | own, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def serve() -> None:
    """Answers calls on standard input, a line of JSON each, in the child process."""
    for line in sys.stdin:
        module, name, given, seconds, memory = json.loads(line)
        function = getattr(import_module(module), name)
        try:
            _limit(seconds, memory)
            reply = json.dumps([function(*given), None])
        except MemoryError:
            return
        except BaseException as error:  # a panic of Rust is no Exception
            reply = json.dumps([None, str(error).split("\n")[0][:2000]])
        _limit(0, 0)
        if len(reply) > LONGEST:
            return
        print(reply, flush=True)


def _limit(seconds: float, memory: int) -> None:
    """Limits what this process may still take, where that is possible; 0 lifts the limit."""
    with suppress(AttributeError, ImportError, OSError, ValueError):
        import resource

        signal.setitimer(signal.ITIMER_PROF, seconds)  # it ends the process
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + memory if memory else hard, hard))


if __name__ == "__main__":
    serve()
