"""The one kind of error that is shown as a single line instead of a traceback."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """What the person at the keyboard can mend: it names what was given and what was expected."""


class OtherRankError(UserError):
    """A `UserError` of another rank, which shows it; this one ends without a word."""


def unknown_name(what: str, given: str, known: Iterable[str], also: str = "") -> UserError:
    """The error for a name that is not one of `known`: it lists them, the nearest one first."""
    known = tuple(known)
    nearest = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    expected = ", ".join((*map(repr, known), *filter(None, [also])))
    return UserError(f"unknown {what} {given!r}{hint} (expected one of {expected})")


def counted(number: int, noun: str) -> str:
    """The number with its noun, which gets an s unless there is one: `1 file`, `1,200 files`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write `path` (a full disk, say) into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def shown_in_one_line() -> Iterator[None]:
    """Turns a `UserError`, and what the system refuses, into one line on stderr and exit status 1.

    Every other error is a bug, and passes.
    """
    try:
        yield
    except OtherRankError:
        sys.exit(1)
    except (UserError, OSError) as error:
        rank = os.environ.get("RANK", "0")
        print(
            f"error: {error}" if rank == "0" else f"[rank {rank}] error: {error}", file=sys.stderr
        )
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def run_command(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Runs a command with the process's arguments; what it returns is the exit status."""
    with shown_in_one_line():
        sys.exit(main(sys.argv[1:]))
