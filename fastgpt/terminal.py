"""Text for terminals: printed through one filter, which lets no control character through.

Generated text, file names and the content of foreign files may hold escape sequences, with which a
terminal changes its title, its clipboard or the text that it shows.
"""

import logging
import re
import sys
from collections.abc import Iterable
from typing import TextIO

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ACTED_ON = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0 and C1, in which escape sequences begin
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of writing
    "\u2028\u2029\ud800-\udfff]"  # end a line; halves of characters, which UTF-8 cannot hold
)


def printable(text: str) -> str:
    """Replaces what a terminal would act on by U+FFFD; newlines and tabs stay."""
    text = text.replace("\r\n", "\n")
    return _ACTED_ON.sub(lambda m: m[0] if m[0] in "\n\t" else REPLACEMENT, text)


def one_line(text: str) -> str:
    r"""Replaces what a terminal would act on, newlines too, by escapes such as `\x1b`."""
    return _ACTED_ON.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def print_line(line: str) -> None:
    """Prints one line to stderr."""
    _write(f"{one_line(line)}\n", sys.stderr)


def print_text(text: str) -> None:
    """Prints text to stdout, and a newline; into a pipe or a file, as it is."""
    _write(f"{printable(text) if sys.stdout.isatty() else text}\n", sys.stdout)


def print_stream(pieces: Iterable[str], *, interruptible: bool = False) -> str:
    """Prints text as it comes, as `print_text` does, and returns it.

    Ctrl-C ends the program, or if `interruptible` the text.
    """
    said = held = ""
    try:
        for piece in pieces:
            said, held = said + piece, held + piece
            if not held.endswith("\r"):  # a newline may follow
                _write(printable(held) if sys.stdout.isatty() else held, sys.stdout)
                held = ""
    except KeyboardInterrupt:
        if not interruptible:
            raise
    print_text(held)
    return said


def _write(text: str, to: TextIO) -> None:
    encoding = to.encoding or "utf-8"  # that of the C locale may lack characters
    print(text.encode(encoding, "replace").decode(encoding), end="", file=to, flush=True)


class OneLine(logging.Formatter):
    """Formatter of log records that are shown on stderr."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(f"{record.levelname.lower()}: {super().format(record)}")
