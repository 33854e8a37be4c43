"""The one kind of error that is shown as a single line instead of a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something the person at the keyboard can mend: it names what was given and what was expected."""


@contextmanager
def shown_in_one_line() -> Iterator[None]:
    """Turns a `UserError` into one line on stderr and exit status 1; every other error is a bug and passes."""
    try:
        yield
    except UserError as error:
        rank = int(os.environ.get("RANK", "0"))
        print(f"error: {error}" if rank == 0 else f"[rank {rank}] error: {error}", file=sys.stderr)
        sys.exit(1)
