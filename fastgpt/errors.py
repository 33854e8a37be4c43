"""`UserError`, which is shown as a single line instead of a traceback."""

import difflib
import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from fastgpt.terminal import one_line, print_line, printable

NO_SPACE = os.strerror(errno.ENOSPC)
"""The system's message for a full disk, the only part of that error that safetensors keeps."""

LONGEST = 2000
"""Largest number of characters in a message; a damaged file may hold a value as long as itself."""
LONGEST_VALUE = 200
"""Largest number of characters of a single value in a message."""


class UserError(Exception):
    """An error that the user can correct: it names what was given and what was expected.

    >>> fastgpt.load("runs/missing")
    Traceback (most recent call last):
    fastgpt.errors.UserError: runs/missing does not exist: expected a run such as runs/NAME, ...
    """

    def __init__(self, message: str) -> None:
        half = LONGEST // 2
        cut = f"{message[: half - 5]} ... {message[-half:]}"
        super().__init__(message if len(message) <= LONGEST else cut)


class UsageError(UserError):
    """A `UserError` of a command's flags: the command exits with status 2."""


class OtherRankError(UserError):
    """A `UserError` of another rank, which prints it; this rank prints nothing."""


def shown(value: object) -> str:
    """Writes a value of a foreign file for a message: of a container only its type and length.

    Values of a file may be huge, or contain each other so often that `repr` would not end.
    """
    if isinstance(value, str):
        return repr(value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}...")
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    sized = isinstance(value, list | tuple | dict | set | bytes | bytearray)
    length = f" and length {len(value):,}" if sized else ""
    return f"a value of type {type(value).__name__}{length}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns a question that names the nearest of the `known` names; empty if none is near."""
    known, end = tuple(known), f".{given.lstrip('-')}"  # of --optim.lr, if --lr is given
    longer = [x for x in known if given and (x.startswith(given) or x.endswith(end))]
    nearest = longer or difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def unknown_name(what: str, given: str, known: Iterable[str], also: str = "") -> UserError:
    """Returns the error for a name not in `known`, which lists them and suggests the nearest."""
    known, given = tuple(known), given[:LONGEST_VALUE]
    expected = ", ".join((*map(repr, known), *filter(None, [also])))
    hint = did_you_mean(given, known)
    return UserError(f"unknown {what} {given!r}{hint} (expected one of {expected})")


def counted(number: int, noun: str) -> str:
    """Writes a number with its noun, in the plural unless it is 1: `1 file`, `1,200 files`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an `OSError` met while writing `path` into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        full = f"no space left on the disk of {path}" if is_disk_full(error) else ""
        raise UserError(full or f"cannot write {path}: {reason(error)}") from error


def tell_torchrun(line: str) -> None:
    """Makes torchrun end its report of a failure with `line`."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def is_disk_full(error: BaseException) -> bool:
    """Returns True if `error`, or a cause of it, says that the disk or its quota is full."""
    return any(
        getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or NO_SPACE in str(e)
        for e in _chain(error)
    )


def reason(error: BaseException) -> str:
    """Returns the system's message if an `OSError` caused `error`, else its own first line."""
    system = (e.strerror for e in _chain(error) if isinstance(e, OSError) and e.strerror)
    return next(system, str(error).split("\n")[0])


def brief(error: BaseException) -> str:
    """Returns the kind of an error and its `reason`, since a KeyError's alone says too little."""
    return f"{type(error).__name__}: {reason(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields `error` and its causes: PyTorch wraps an OSError in a RuntimeError."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class OneLine(logging.Formatter):
    """Formatter of log records that are shown on stderr."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(f"{record.levelname.lower()}: {super().format(record)}")


@contextmanager
def shown_in_one_line(status: int = 1) -> Iterator[None]:
    """Turns a `UserError`, an `OSError` or a lack of GPU memory into one line and exit `status`.

    Other errors are bugs and keep their traceback.
    """
    # nothing that a command writes is writable for everyone, and without a mask not for the group
    os.umask((os.umask(0o077) or 0o022) | 0o002)
    if logging.lastResort is not None:  # shows records on stderr where no other handler is set
        logging.lastResort.setFormatter(OneLine())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by a shell script for `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except BrokenPipeError:  # whoever read the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError):
            if "out of memory" not in str(error):  # torch's, of CUDA and of the allocator
                raise
            first = ". ".join(str(error).split("\n")[0].split(". ")[:3]).rstrip(".")
            cure = "end other programs on the GPU (nvidia-smi shows them), or pass smaller sizes"
            error = UserError(f"{first}: {cure}")
        rank = os.environ.get("RANK", "0")
        line = f"error: {error}" if rank == "0" else f"[rank {rank}] error: {error}"
        if not isinstance(error, OtherRankError):
            print_line(line)
        tell_torchrun(one_line(f"error: {error}"))
        sys.exit(2 if isinstance(error, UsageError) else status)
    except KeyboardInterrupt as error:
        print_line(f"interrupted {error}".rstrip())
        sys.exit(130)


def run_command(main: Callable[[list[str]], int | None], error_status: int = 1) -> NoReturn:
    """Runs a command with the process's arguments, and exits with the status that it returns."""
    with shown_in_one_line(error_status):
        sys.exit(main(sys.argv[1:]))
