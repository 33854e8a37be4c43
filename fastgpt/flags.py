"""Command-line parsing with tyro, whose errors become one line.

A command is a dataclass. Its field names are the flags, and the text below a field is its help.
"""

import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial, wraps
from typing import Any, TypeVar, get_type_hints

import tyro

import fastgpt
from fastgpt.config.checks import expected
from fastgpt.errors import UsageError, UserError, shown_in_one_line
from fastgpt.terminal import print_text

T = TypeVar("T")


def parse(
    kind: Callable[..., T],
    argv: Sequence[str],
    *,
    prog: str,
    default: T | None = None,
    about: str = "",
    first: str = "arguments",
) -> T:
    """Parses `argv` into a `kind`; --help and --version print and exit.

    Args:
        default: the values of flags that are not given; by default the dataclass's.
        about: first paragraph of the help; by default the dataclass's docstring.
        first: what comes before the flags, for the message about a word out of place.

    Raises:
        UsageError: a flag or value is unknown, missing or of the wrong type.
    """
    if "--version" in argv:
        print_text(f"fastgpt {fastgpt.__version__}")
        sys.exit()
    options: dict[str, Any] = {} if default is None else {"default": default}
    options |= {"prog": prog, "config": [tyro.conf.PositionalMetavarFromFieldName]}
    help_text, complaint = io.StringIO(), io.StringIO()  # no terminals, so tyro writes no colours
    try:
        with redirect_stdout(help_text), redirect_stderr(complaint):
            return tyro.cli(kind, args=argv, description=about or kind.__doc__, **options)
    except SystemExit as stopped:
        if stopped.code:
            said = _in_one_line(complaint.getvalue())
            raise UsageError(_in_our_words(said, kind, argv, first)) from None
        print_text(help_text.getvalue().rstrip())
        raise
    except UserError as error:
        raise UsageError(str(error)) from error


def help_text(kind: Callable[..., T], *, prog: str, default: T, about: str) -> str:
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        tyro.cli(kind, args=["--help"], description=about, default=default, prog=prog)
    return said.getvalue().rstrip()


def run(main: Callable[..., None]) -> None:
    """Runs a function whose parameters are the flags, as the programs in examples/ do."""
    with shown_in_one_line():
        given = wraps(main)(lambda *args, **flags: partial(main, *args, **flags))
        about = str(main.__doc__).partition("\n")[0]
        parse(given, sys.argv[1:], prog=f"python {sys.argv[0]}", about=about)()


def _in_one_line(box: str) -> str:
    """Returns what tyro says in a box as one line, without title, frame and the help of flags."""
    said = [""]
    for line in box.splitlines()[1:]:
        text = line[1:-1]  # between two sides of the frame
        if text.strip() == "Argument helptext:":
            break
        if not text.strip("-─ "):
            said.append("")
        elif not text.startswith(9 * " "):
            said[-1] += f" {text.strip()}"
    return ";".join(filter(None, said)).strip().removeprefix("Error parsing ")


_WRONG_VALUE = re.compile(
    r"(?P<flag>--[\w.-]+): .*?(?P<value>\['.*?\]|'.*?')(?:$|\.;)"
    r"|invalid choice (?P<choice>'.*') for argument '(?P<of>--[\w.-]+)'"
    r"|Missing value for argument '(?:-./)?(?P<none>--[\w.-]+)'"
)


def _in_our_words(said: str, kind: Any, argv: Sequence[str], first: str) -> str:
    """Returns what was given and expected, where tyro complains of a value."""
    unknown = said.removeprefix("Unrecognized options: ").split(";")[0].split(", ")[0]
    if unknown in argv and not unknown.startswith("-"):
        before = "".join([*argv][: argv.index(unknown)][-1:])
        order = f": expected {first}, then flags and their values"
        why = f" after {before}, which takes no value" if before.startswith("--") else order
        return f"unexpected {unknown!r}{why}"
    if (found := _WRONG_VALUE.match(said)) is None:
        return said
    name = found["flag"] or found["of"] or found["none"]
    hint = kind
    for part in name[2:].replace("-", "_").split("."):
        hint = get_type_hints(hint, include_extras=True)[part]
    given = "has no value" if found["none"] else f"is {found['value'] or found['choice']}"
    return f"{name} {given}: expected {expected(hint)}"
