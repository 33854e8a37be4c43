"""Command-line parsing with tyro, whose errors become one line.

A command is a dataclass. Its field names are the flags, and the text below a field is its help.
"""

import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import chain
from typing import Any, TypeVar, get_type_hints

import tyro
from docstring_parser import parse_from_object

import fastgpt
from fastgpt.config.checks import expected, flag
from fastgpt.errors import UsageError, UserError, shown_in_one_line
from fastgpt.terminal import print_text

T = TypeVar("T")


def parse(
    kind: Callable[..., T],
    argv: Sequence[str],
    *,
    prog: str,
    default: T | None = None,
    first: str = "arguments",
) -> T:
    """Parses `argv` into a `kind`.

    Args:
        default: the values of flags that are not given; by default the dataclass's.
        first: what comes before the flags, for the message about a word out of place.

    Raises:
        UsageError: a flag or value is unknown, missing or of the wrong type.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    options |= {"prog": prog, "config": [tyro.conf.PositionalMetavarFromFieldName]}
    complaint = io.StringIO()  # no terminal, so tyro writes no colours
    try:
        with redirect_stderr(complaint), redirect_stdout(io.StringIO()):
            return tyro.cli(kind, args=argv, **options)
    except SystemExit:
        said = _in_one_line(complaint.getvalue()) or "expected no flag that prints, such as --help"
        raise UsageError(_in_our_words(said, kind, argv, first)) from None
    except UserError as error:
        raise UsageError(str(error)) from error


def command(kind: Callable[..., T], argv: Sequence[str], *, prog: str, about: str = "") -> T:
    """Parses the flags of a command; --help and --version print and exit.

    Args:
        about: first paragraph of the help; by default the dataclass's docstring.

    Raises:
        UsageError: as `parse`.
    """
    if "--version" in argv:
        print_text(f"fastgpt {fastgpt.__version__}")
        sys.exit()
    if {"-h", "--help"} & {*argv}:
        print_text(help_text(kind, prog=prog, about=about))
        sys.exit()
    return parse(kind, argv, prog=prog)


# --- help -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flag:
    """Field of a dataclass, or parameter of a function, as it is on the command line."""

    name: str
    hint: Any
    default: Any
    text: str

    def has(self, mark: Any) -> bool:
        return mark in getattr(self.hint, "__metadata__", ())

    @property
    def required(self) -> bool:
        return self.default is Parameter.empty

    @property
    def spelled(self) -> str:
        return self.name.upper() if self.has(tyro.conf.Positional) else flag(self.name)

    @property
    def first_sentence(self) -> str:
        return re.split(r"(?<=\.) ", self.text)[0]

    def title(self) -> str:
        """Returns its names, its type and its default."""
        kind, default = f": {expected(self.hint)}", self.default
        for mark in getattr(self.hint, "__metadata__", ()):
            kind = "".join(f", {x}" for x in getattr(mark, "aliases", None) or ()) + kind
        if self.hint is bool:
            section, dot, name = self.spelled[2:].rpartition(".")
            kind = f", --{section}{dot}no-{name}"
        if self.required or default in (None, "", ()):
            return self.spelled + kind
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        return f"{self.spelled}{kind} (default: {shown})"


def flags_of(kind: Any, default: Any = None, section: str = "") -> Iterator[Flag]:
    """Yields the flags of a dataclass and of those in it, or of a function."""
    texts, hints = _texts(kind), get_type_hints(kind, include_extras=True)
    for name, parameter in signature(kind).parameters.items():
        value = parameter.default if default is None else getattr(default, name)
        found = Flag(section + name, hints[name], value, texts.get(name, ""))
        if is_dataclass(found.hint):
            yield from flags_of(found.hint, default and value, f"{found.name}.")
        elif not found.has(tyro.conf.Suppress):
            yield found


def _texts(kind: Any) -> dict[str, str]:
    """Returns the text below each field of a dataclass, or about each argument of a function."""
    kinds = getattr(kind, "__mro__", (kind, object))[:-1]
    known = chain.from_iterable(parse_from_object(x).params for x in reversed(kinds))
    return {x.arg_name: " ".join((x.description or "").split()) for x in known}


def help_text(
    kind: Any, default: Any = None, *, prog: str, about: str = "", common: Sequence[str] = ()
) -> str:
    """Returns the help of a command, at most 80 columns wide.

    Args:
        common: flags to show, with the first sentence of each; by default all with all they say.
    """
    known = sorted(flags_of(kind, default), key=lambda x: (x.spelled[:2] == "--", not x.required))
    needed = (x.spelled + " VALUE" * (x.spelled[:2] == "--") for x in known if x.required)
    fill = partial(textwrap.fill, width=80, break_on_hyphens=False, break_long_words=False)
    about = " ".join((about or str(kind.__doc__)).split())
    lines = [f"usage: {' '.join([prog, *needed])} [--FLAG VALUE ...]", "", fill(about), ""]
    for x in known:
        if x.name in common or not common:
            text, gap = x.first_sentence if common else x.text, 6 * " "
            lines.append(fill(x.title(), initial_indent="  ", subsequent_indent=gap))
            lines.append(fill(text, initial_indent=gap, subsequent_indent=gap))
    return "\n".join(lines)


def run(main: Callable[..., None]) -> None:
    """Runs a function whose parameters are the flags, as the programs in examples/ do."""
    with shown_in_one_line():
        given = wraps(main)(lambda *args, **flags: partial(main, *args, **flags))
        about = str(main.__doc__).partition("\n")[0]
        command(given, sys.argv[1:], prog=f"python {sys.argv[0]}", about=about)()


def _in_one_line(box: str) -> str:
    """Returns what tyro says in a box as one line, without title, frame and the help of flags."""
    said = box.partition("\n")[2].partition("Argument helptext:")[0]
    parts = re.split(r"^.[ ─-]*.$", said, flags=re.M)  # at empty lines and rules
    words = (re.sub(r"^. {9}.*|^.|.$", "", part, flags=re.M).split() for part in parts)
    return "; ".join(" ".join(x) for x in words if x).removeprefix("Error parsing ")


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
    [hint] = (x.hint for x in flags_of(kind) if x.spelled == name.replace("_", "-"))
    given = "has no value" if found["none"] else f"is {found['value'] or found['choice']}"
    return f"{name} {given}: expected {expected(hint)}"
