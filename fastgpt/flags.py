"""Command-line parsing with tyro; help, suggestions and one-line errors are our own.

A command is a dataclass. Its field names are the flags, and the text below a field is its help.
"""

import contextlib
import difflib
import functools
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import dropwhile, groupby, takewhile
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object

import fastgpt
from fastgpt.errors import UserError
from fastgpt.terminal import print_text

T = TypeVar("T")
ANSWERED = ("--help", "-h", "--help-all", "--version")
"""Flags that print something and exit."""
_ANSI = re.compile("\x1b\\[[0-9;]*m")
_HELP = re.compile("[│ ] {8}")
"""How tyro indents the help of a flag that is missing."""
MORE = "--help-all lists every flag; --version prints the version."


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """Flag of a command, described by a field of the command's dataclass."""

    path: str
    """Name of the field, such as `model.num_layers`."""
    text: str
    default: Any
    section: str
    """Docstring of the dataclass that has the field."""
    choices: tuple[Any, ...]
    positional: bool

    @property
    def name(self) -> str:
        """Name as the help shows it: `--model.num-layers`, `--model.[no-]tied`, `RUN`."""
        switch = isinstance(self.default, bool)
        return self.path.upper() if self.positional else self._spelled("[no-]" * switch)

    @property
    def spellings(self) -> list[str]:
        """Names that are accepted: two for a switch, none for a positional argument."""
        prefixes = ["", "no-"] if isinstance(self.default, bool) else [""]
        return [] if self.positional else [self._spelled(no) for no in prefixes]

    def _spelled(self, no: str) -> str:
        section, dot, last = self.path.replace("_", "-").rpartition(".")
        return f"--{section}{dot}{no}{last}"

    def help(self, *, full: bool = True) -> str:
        """Describes the flag and its default; not `full`, in the first sentence of its text."""
        parts = [self.text if full else re.split(r"(?<=\.)\s+", self.text)[0]]
        if full and self.choices:
            parts.append(f"{{{', '.join(map(str, self.choices))}}}")
        if self.default is MISSING:
            parts += [] if self.positional else ["(required)"]
        elif self.default not in (None, "", ()):
            plain = not isinstance(self.default, str) or self.default.isprintable()
            parts.append(f"[{self.default if plain else repr(self.default)}]")
        return " ".join(parts)


def parse(
    kind: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    first: Sequence[str] = (),
    usage: str = "",
    default: T | None = None,
    about: str = "",
    more: str = MORE,
) -> T:
    """Parses `argv` into a `kind`; --help, --help-all and --version print and exit.

    Args:
        kind: the command's dataclass.
        argv: the arguments, without the command's own name.
        prog: the command's name.
        first: fields that --help shows, such as `model.num_layers`; by default all.
        usage: the text after the command's name; by default the positional arguments and flags.
        default: the values of flags that are not given; by default the dataclass's.
        about: first paragraph of the help; by default the dataclass's docstring.
        more: last paragraph of the help with the fields of `first`.

    Raises:
        UserError: a flag or value is unknown, missing or of the wrong type.
    """
    flags = {flag.path: flag for flag in flags_of(kind, default)}
    if "--version" in argv:
        print_text(f"fastgpt {fastgpt.__version__}")
        sys.exit()
    if {*ANSWERED} & {*argv}:
        usage = usage or _usage(flags.values())
        parts = [f"usage: {prog} {usage}", wrapped(about or kind.__doc__ or "")]
        if first and "--help-all" not in argv:
            parts.append(table((flags[path].name, flags[path].help(full=False)) for path in first))
            parts.append(wrapped(more))
        else:
            parts += _sections(flags.values())
        print_text("\n\n".join(parts))
        sys.exit()
    options: dict[str, Any] = {} if default is None else {"default": default}
    options |= {"prog": prog, "config": [tyro.conf.PositionalMetavarFromFieldName]}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            result = tyro.cli(kind, args=argv, return_unknown_args=True, **options)
    except SystemExit:
        raise UserError(_first_paragraph(said.getvalue())) from None
    found, unknown = result
    if unknown and unknown[0].startswith("-"):
        given = unknown[0].split("=")[0]
        near = " or ".join(map(repr, near_flags(given, flags.values())))
        hint = f"did you mean {near}?" if near else "--help-all lists every flag"
        raise UserError(f"unknown argument {given!r}; {hint}")
    if unknown:
        raise UserError(f"unexpected argument {unknown[0]!r}; expected a --flag")
    return found


def flags_of(kind: Any, default: Any = None, prefix: str = "") -> Iterator[Flag]:
    """Yields the flags of a dataclass and of the dataclasses in it."""
    texts = _texts(kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        own = field.default if field.default_factory is MISSING else field.default_factory()
        hint, value = hints[field.name], getattr(default, field.name, own)
        marks = getattr(hint, "__metadata__", ())
        plain = get_args(hint)[0] if marks else hint
        if is_dataclass(value):
            yield from flags_of(type(value), value, f"{prefix}{field.name}.")
        elif tyro.conf.Suppress not in marks:
            yield Flag(
                path=prefix + field.name,
                text=" ".join(texts.get(field.name, "").split()),
                default=value,
                section=kind.__doc__ or "",
                choices=get_args(plain) if get_origin(plain) is Literal else (),
                positional=tyro.conf.Positional in marks,
            )


@functools.cache
def _texts(kind: Any) -> dict[str, str]:
    """Returns the descriptions of a dataclass's fields, for which its source is parsed."""
    classes = filter(is_dataclass, reversed(kind.__mro__))
    described = [param for base in classes for param in parse_from_object(base).params]
    return {param.arg_name: param.description or "" for param in described}


def near_flags(given: str, flags: Iterable[Flag]) -> list[str]:
    """Finds the flags whose last part is nearest to that of one that does not exist."""
    ends = {name: name.lstrip("-").rpartition(".")[2] for flag in flags for name in flag.spellings}
    last = given.replace("_", "-").lstrip("-").rpartition(".")[2]
    close = difflib.get_close_matches(last, ends.values(), n=1, cutoff=0.7)
    return [name for name, end in ends.items() if end in close]


# --- text -----------------------------------------------------------------------------------------


def wrapped(text: str, indent: str = "") -> str:
    """Wraps a paragraph at 80 columns, or at the width of a narrower terminal."""
    width = min(80, shutil.get_terminal_size().columns)
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Lays out names with a text beside each."""
    rows = list(rows)
    column = min(max(len(name) for name, _ in rows), 24) + 4
    lines = []
    for name, text in rows:
        head, body = f"  {name}".ljust(column), wrapped(text, " " * column)
        lines.append(head + body[column:] if head.endswith("  ") else f"{head}\n{body}")
    return "\n".join(lines)


def _usage(flags: Iterable[Flag]) -> str:
    positional = (flag for flag in flags if flag.positional)
    names = [f.name if f.default is MISSING else f"[{f.name}]" for f in positional]
    return " ".join([*names, "[--FLAG VALUE ...]"])


def _sections(flags: Iterable[Flag]) -> Iterator[str]:
    """Yields the help of the command's own flags, then of each section under its heading."""
    for section, group in groupby(flags, key=lambda flag: flag.section):
        group = list(group)
        heading = f"{wrapped(section)}\n" if "." in group[0].path else ""
        yield heading + table((flag.name, flag.help()) for flag in group)


def _first_paragraph(box: str) -> str:
    """Returns the first paragraph of tyro's message as one line, without title, bars and help."""
    has_text = re.compile(r"\w").search
    lines = dropwhile(lambda line: not has_text(line), _ANSI.sub("", box).splitlines()[1:])
    texts = [line.strip("│ ") for line in takewhile(has_text, lines) if not _HELP.match(line)]
    return " ".join(texts).removeprefix("Error parsing ")
