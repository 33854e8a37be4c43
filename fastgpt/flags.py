"""Command-line parsing with tyro, whose errors become one line.

A command is a dataclass. Its field names are the flags, and the text below a field is its help.
"""

import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import chain
from typing import Any, NoReturn, TypeVar, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro import _errors  # the only way to its errors before they are drawn in a box

import fastgpt
from fastgpt.config.checks import expected, flag
from fastgpt.errors import UsageError, UserError, did_you_mean, shown_in_one_line
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

    def refuse(event: _errors.ParseErrorEvent) -> NoReturn:
        raise UsageError(_refusal(event, flags_of(kind), argv, first))

    try:
        with _errors.on_parse_error(refuse), redirect_stdout(io.StringIO()):
            return tyro.cli(kind, args=argv, **options)
    except SystemExit:
        raise UsageError("expected no flag that prints, such as --help") from None
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


def _refusal(event: Any, known: Iterator[Flag], argv: Sequence[str], first: str) -> str:
    """Returns what was given and what was expected, where tyro refuses a command line."""
    named = {x.name if x.has(tyro.conf.Positional) else x.spelled: x for x in known}
    match event:
        case _errors.UnrecognizedArgs(tokens=[word, *_]) if word.startswith("-"):
            name = word.partition("=")[0].replace("_", "-")
            return f"unknown flag {name!r}{did_you_mean(name, named)} (--help lists them)"
        case _errors.UnrecognizedArgs(tokens=[word, *_]):
            words = [*chain.from_iterable(x.split("=", x[:1] == "-") for x in argv)]
            before = dict(zip(words[1:], words)).get(word, "")
            if before.startswith("--"):
                return f"unexpected {word!r} after {before}, which takes no value"
            return f"unexpected {word!r}: expected {first}, then flags and their values"
        case _errors.MissingArgs(missing_arguments=missing):
            names = (named[x.arg.lowered.name_or_flags[-1]].spelled for x in missing)
            return f"missing: {', '.join(names)} (see {event.prog} --help)"
        case _errors.InvalidChoice(value=value):
            given = f"is {value!r}"
        case _errors.InstantiationFailure(message=message):
            # the value, with which Python's message ends, and the first line of tyro's own
            given = re.sub(r".*?(: | from )(.*?)[.]?(\n.*)?$", r"is \2", message, flags=re.S)
        case _:
            given = "has no value"
    meant = named[vars(event)["argument"].lowered.name_or_flags[-1]]
    return f"{meant.spelled} {given}: expected {expected(meant.hint)}"
