"""Types and bounds of settings, which the fields of a dataclass declare.

An error names the flag, what was given and what was expected.
"""

from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from fastgpt.errors import UserError, shown


class Range(NamedTuple):
    """Bounds of a number, declared at its field, as in `lr: Annotated[float, POSITIVE] = 6e-4`."""

    words: str
    """Words for the error: the number that is expected."""
    allows: Callable[[float], bool]


POSITIVE = Range("a number greater than 0", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or more", lambda x: x >= 0)
INT64 = Range("0 to 2^63 - 1", lambda x: 0 <= x < 2**63)
FRACTION = Range("a fraction in [0, 1)", lambda x: 0 <= x < 1)
SHARE = Range("a number from 0 to 1", lambda x: 0 <= x <= 1)
SIZE = Range(f"1 to {2**22:,}", lambda x: 1 <= x <= 2**22)
"""Size of a model: larger ones would ask for memory, or overflow, before a file is refused."""


def flag(name: str) -> str:
    """Returns the flag that sets the field `name`: `--model.num-layers` for `model.num_layers`."""
    return f"--{name.replace('_', '-')}"


_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "text", Path: "a path",
          NoneType: "None", Ellipsis: "..."}  # fmt: skip


def expected(hint: Any) -> str:
    """Writes the type of a field in words, for an error or the help."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return " or ".join(map(str, inner))
    if kind is Annotated:
        return expected(inner[0])
    if kind is tuple:
        return f"a list ({', '.join(map(expected, inner))})"
    return _WORDS.get(hint) or " or ".join(map(expected, inner)) or str(hint)


def check_fields(config: Any, section: str = "") -> None:
    """Raises `UserError` unless each field has its type, and each number lies in its `Range`.

    The `section`, such as `model.`, stands before the names of the dataclass's flags.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value, words = getattr(config, name), ""
        try:
            check_type(value, hint, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except TypeCheckError:
            words = expected(hint)
        for bounds in getattr(hint, "__metadata__", ()):
            if isinstance(bounds, Range) and isinstance(value, int | float):
                right = bounds.allows(value) and not isinstance(value, bool)
                words = words or ("" if right else bounds.words)
        if words:
            raise UserError(f"{flag(section + name)} is {shown(value)}: expected {words}")
