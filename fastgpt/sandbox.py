"""Functions called in a child process, with limits of time and memory.

Chat templates and tokenizers of others are small programs: loops, regular expressions and
replacements. A child process runs them, so that one without end harms nothing. It is started by the
first call, stays for the next ones, and imports what the functions need, so never torch. Time is
limited on Linux and macOS, memory on Linux only.
"""

import atexit
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
and 64 MiB."""
LONGEST = 2**24
"""Characters of the longest result."""
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from fastgpt.sandbox import serve; serve()"
)
_lock = Lock()


class Refused(Exception):  # noqa: N818 - what the function raised is not known here
    """An error that the function raised, of which the first line is left."""


def call(what: str, function: Callable[..., Any], *given: Any) -> Any:
    """Returns the result of a function of a module, called in the child process.

    Args:
        what: subject of the error, such as "the chat template".
        given: its arguments, which are sent as JSON, as is the result.

    Raises:
        Refused: the function raised an error.
        UserError: it took too much time or memory.
    """
    each = 1 + len(json.dumps(given)) / 2**20
    seconds, memory = SECONDS * each, int(MEMORY * each)
    request = function.__module__, function.__name__, given, seconds, memory
    with _lock:
        child = _child(os.getpid())
        kind, value = "ended", 0
        try:
            with suppress(OSError):  # it has ended
                print(json.dumps(request), file=child.stdin, flush=True)
            if reply := child.stdout.readline() if child.stdout else "":
                kind, value = json.loads(reply)
        finally:
            if kind == "ended":  # or Ctrl-C: the next call would get this one's reply
                value = _end(child)
    if kind == "result":
        return value
    if kind == "error":
        raise Refused(value)
    if value == -getattr(signal, "SIGPROF", 0):
        raise UserError(f"{what} takes more than {seconds:.2g} s")
    if value == -signal.SIGABRT:
        raise UserError(f"{what} takes more than {memory >> 20} MiB of memory")
    raise UserError(f"{what} ends the process that reads it (status {value})")


@cache
def _child(_: int) -> subprocess.Popen[str]:
    """Starts the child of a process, by its id: after a fork there is none."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", START, json.dumps(sys.path)],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"}, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    atexit.register(_end, child)
    return child


def _end(child: subprocess.Popen[str]) -> int:
    """Closes the input of a child, with which it ends, and returns its status."""
    _child.cache_clear()
    with suppress(OSError), child:
        pass
    return child.returncode


def serve() -> None:
    """Answers calls on standard input, a line of JSON each, in the child process."""
    for line in sys.stdin:
        module, name, given, seconds, memory = json.loads(line)
        function = getattr(import_module(module), name)
        try:
            _limit(seconds, memory)
            reply = json.dumps(["result", function(*given)])
        except MemoryError:
            os.abort()
        except BaseException as error:  # a panic of Rust is no Exception
            reply = json.dumps(["error", str(error).split("\n")[0][:2000]])
        _limit(0, 0)
        if len(reply) > LONGEST:
            os.abort()
        print(reply, flush=True)


def _limit(seconds: float, memory: int) -> None:
    """Limits what this process may still take, where that is possible; 0 lifts the limit."""
    with suppress(AttributeError, ImportError, OSError, ValueError):
        import resource

        signal.setitimer(signal.ITIMER_PROF, seconds)  # it ends the process
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + memory if memory else hard, hard))
