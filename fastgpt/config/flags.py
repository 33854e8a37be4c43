"""Command-line parsing with tyro, a short --help, and suggestions for unknown flags.

A command is a dataclass. Its field names are the flags, and the text below a field is its help.
"""

import contextlib
import difflib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object

import fastgpt
from fastgpt.errors import UserError
from fastgpt.terminal import print_text

T = TypeVar("T")
WIDTH = 80
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Space at which lines are not wrapped, so that no default stands alone on a line."""
ANSWERED = ("--help", "-h", "--help-all", "--version")
"""Flags that print something and exit."""
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
    kind: Any
    """Type of the field, such as `int | None`."""
    positional: bool

    @property
    def name(self) -> str:
        """Name as the help shows it: `--model.num-layers`, `--model.[no-]tied`, `RUN`."""
        if self.positional:
            return self.path.upper()
        section, dot, last = self.path.replace("_", "-").rpartition(".")
        return f"--{section}{dot}{'[no-]' * isinstance(self.default, bool)}{last}"

    @property
    def spellings(self) -> list[str]:
        """Names that are accepted: two for a switch, none for a positional argument."""
        if self.positional:
            return []
        return list(dict.fromkeys(self.name.replace("[no-]", no) for no in ("", "no-")))

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of a `Literal` field; empty for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def summary(self) -> str:
        """Short description of the flag: the first sentence of its help, and its default."""
        return re.split(r"(?<=\.)\s+", self.text)[0] + self._default()

    @property
    def help(self) -> str:
        """Whole help, the choices unless it names them all, and the default."""
        choices = [str(choice) for choice in self.choices]
        named = {*choices} <= {*re.findall(r"\w+", self.text)}
        return self.text + ("" if named else f" {{{', '.join(choices)}}}") + self._default()

    def _default(self) -> str:
        if self.default is MISSING:
            return "" if self.positional else f"{NO_BREAK}(required)"
        if self.default in (None, "", ()):
            return ""
        plain = not isinstance(self.default, str) or self.default.isprintable()
        return f"{NO_BREAK}[{self.default if plain else repr(self.default)}]"


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
        first: fields that the short help shows, such as `model.num_layers`; by default all.
        usage: the text after the command's name; by default the positional arguments and flags.
        default: the values of flags that are not given; by default the dataclass's.
        about: first paragraph of the help; by default the dataclass's docstring.
        more: last paragraph of the short help.

    Raises:
        UserError: a flag or value is unknown, missing or of the wrong type.
    """
    flags = list(flags_of(kind, default))
    if "--version" in argv:
        print_text(f"fastgpt {fastgpt.__version__}")
        sys.exit()
    if "--help-all" in argv or "--help" in argv or "-h" in argv:
        start = [f"usage: {prog} {usage or _usage(flags)}", wrapped(about or kind.__doc__ or "")]
        full = "--help-all" in argv or not first
        rest = _all(flags) if full else [_summaries(flags, first), wrapped(more)]
        print_text("\n\n".join([*start, *rest]))
        sys.exit()
    options: dict[str, Any] = {} if default is None else {"default": default}
    options |= {"prog": prog, "return_unknown_args": True}
    result = _tyro(kind, argv, **options)
    if result is None:
        raise refused(argv, flags)
    found, unknown = result
    if unknown and unknown[0].startswith("-"):
        raise unknown_flag(unknown[0].split("=")[0], flags)
    if unknown:
        raise UserError(f"unexpected argument {unknown[0]!r}; expected a --flag")
    return found


def _tyro(kind: Any, argv: Sequence[str], **options: Any) -> Any:
    """Result of tyro, or None where it refuses the arguments; its own message is not shown."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(kind, args=argv, **options)
    except SystemExit:
        return None


def flags_of(kind: Any, default: Any = None, prefix: str = "") -> Iterator[Flag]:
    """Yields the flags of a dataclass and of the dataclasses in it."""
    texts = {p.arg_name: p.description or "" for p in parse_from_object(kind).params}
    hints = get_type_hints(kind, include_extras=True)
    own = [field for field in fields(kind) if not _marked(hints[field.name], tyro.conf.Suppress)]
    for field in own:
        hint, value = hints[field.name], getattr(default, field.name, _default(field))
        if is_dataclass(value):
            yield from flags_of(type(value), value, f"{prefix}{field.name}.")
        else:
            yield Flag(
                path=prefix + field.name,
                text=" ".join(texts.get(field.name, "").split()),
                default=value,
                section=kind.__doc__ or "",
                kind=get_args(hint)[0] if hasattr(hint, "__metadata__") else hint,
                positional=_marked(hint, tyro.conf.Positional),
            )


def _marked(hint: Any, marker: Any) -> bool:
    return marker in getattr(hint, "__metadata__", ())


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


# --- text -----------------------------------------------------------------------------------------


def wrapped(text: str, indent: str = "") -> str:
    """Wraps a paragraph at 80 columns, or at the width of a narrower terminal."""
    width = min(WIDTH, shutil.get_terminal_size().columns)
    options: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    text = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, **options)
    return text.replace(NO_BREAK, " ")


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Lays out names with a text beside each."""
    rows = list(rows)
    column = min(max(len(name) for name, _ in rows), 24) + 4
    lines = []
    for name, text in rows:
        beside = wrapped(text, " " * column)
        name = f"  {name}"
        fits = len(name) + 2 <= column
        lines.append(f"{name:<{column}}{beside[column:]}" if fits else f"{name}\n{beside}")
    return "\n".join(lines)


def _usage(flags: Sequence[Flag]) -> str:
    positional = [flag for flag in flags if flag.positional]
    names = [f.name if f.default is MISSING else f"[{f.name}]" for f in positional]
    return " ".join([*names, "[--FLAG VALUE ...]"])


def _summaries(flags: Sequence[Flag], first: Sequence[str]) -> str:
    by_path = {flag.path: flag for flag in flags}
    return table([(by_path[path].name, by_path[path].summary) for path in first])


def _all(flags: Sequence[Flag]) -> list[str]:
    """Paragraphs of --help-all: one for each section, with the whole help of its flags."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for flag in flags:
        sections.setdefault(flag.section, []).append((flag.name, flag.help))
    if len(sections) == 1:  # its docstring is the command's, which stands above
        return [table(rows) for rows in sections.values()]
    return [f"{wrapped(section)}\n{table(rows)}" for section, rows in sections.items()]


# --- errors ---------------------------------------------------------------------------------------


def refused(argv: Sequence[str], flags: Iterable[Flag]) -> UserError:
    """Error for arguments that tyro refuses: the first wrong value, else what is missing."""
    flags = list(flags)
    by_name = {name: flag for flag in flags for name in flag.spellings}
    starts = [i for i, given in enumerate(argv) if given.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(argv)]):
        name, equals, value = argv[start].partition("=")
        flag = by_name.get(name.replace("_", "-"))
        values = [value] if equals else list(argv[start + 1 : end])
        if flag is None or isinstance(flag.default, bool):
            continue
        if not values:
            expected = _expected(flag)
            detail = "" if expected in ("a value", "a path") else f": expected {expected}"
            return UserError(f"{name} needs a value{detail}")
        if not any(_tyro(tuple[flag.kind], values[:count]) for count in range(1, len(values) + 1)):
            return UserError(f"{name}: expected {_expected(flag)}, got {' '.join(values)!r}")
    given = {argv[i].partition("=")[0].replace("_", "-") for i in starts}
    given |= {f.name for f in flags if f.positional and argv and argv[0] not in given}
    needed = [f.name for f in flags if f.default is MISSING and not given & {f.name, *f.spellings}]
    return UserError(
        f"missing {' and '.join(needed) or 'argument'}; --help describes the arguments"
    )


def _expected(flag: Flag) -> str:
    if flag.choices:
        return f"one of {', '.join(map(str, flag.choices))}"
    names = {int: "an integer", float: "a number", bool: "True or False", Path: "a path",
             str: "a value"}  # fmt: skip
    kinds = [kind for kind in (flag.kind, *get_args(flag.kind)) if kind in names]
    none = NoneType in get_args(flag.kind) and not {str, Path} & {*kinds}
    return " or ".join([*map(names.__getitem__, kinds), *["None"] * none]) or str(flag.kind)


# --- near names -----------------------------------------------------------------------------------


def unknown_flag(given: str, flags: Iterable[Flag]) -> UserError:
    """Returns the error for a flag that does not exist, with the flags that may be meant."""
    near = " or ".join(repr(name) for name in near_flags(given, flags))
    hint = f"did you mean {near}?" if near else "--help-all lists every flag"
    return UserError(f"unknown argument {given!r}; {hint}")


def near_flags(given: str, flags: Iterable[Flag]) -> list[str]:
    """Finds the flags that may be meant by one that does not exist.

    They are those with the same last part (--lr: --optim.lr), else those of similar spelling, else
    the two with the shortest help that contains all its words (--learning-rate).
    """
    flags = list(flags)
    wanted = given.lstrip("-").replace("_", "-")
    names = {name[2:]: name for flag in flags for name in flag.spellings}
    last = wanted.rpartition(".")[2]
    if same := [name for short, name in names.items() if short.rpartition(".")[2] == last]:
        return same
    if close := difflib.get_close_matches(wanted, names, n=1, cutoff=0.7):
        return [names[close[0]]]
    ends = {short.rpartition(".")[2] for short in names}
    if close := difflib.get_close_matches(last, ends, n=1, cutoff=0.7):
        return [name for short, name in names.items() if short.rpartition(".")[2] == close[0]]
    words = set(last.split("-"))
    texts = ((flag.spellings, re.findall(r"\w+", flag.summary.lower())) for flag in flags)
    found = [(len(text), names[0]) for names, text in texts if names and words <= set(text)]
    return [name for _, name in sorted(found)[:2]]
