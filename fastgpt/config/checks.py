"""Checks of single settings, whose errors name the flag, what was given and what was expected."""

import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fastgpt.errors import UserError, shown

POSITIVE = ("a number greater than 0", lambda x: 0 < x < float("inf"))
NOT_NEGATIVE = ("0 or more", lambda x: 0 <= x < float("inf"))
INT64 = ("0 to 2^63 - 1", lambda x: 0 <= x < 2**63)
FRACTION = ("a fraction in [0, 1)", lambda x: 0 <= x < 1)
SIZE = (f"1 to {2**22:,}", lambda x: 1 <= x <= 2**22)
"""Size of a model: larger ones would ask for memory, or overflow, before a file is refused."""
LAYERS = ("1 to 256", lambda x: 1 <= x <= 256)
SHARE = ("a number from 0 to 1", lambda x: 0 <= x <= 1)


def flag(name: str) -> str:
    """Returns the flag that sets the field `name`: `--model.num-layers` for `model.num_layers`."""
    return f"--{name.replace('_', '-')}"


def check(config: object, expected: tuple[str, Callable[[Any], bool]], *names: str) -> None:
    """Raises `UserError` unless each named field, such as `model.dim`, is None or as expected."""
    words, fits = expected
    for name in names:
        value = getattr(config, name.split(".")[-1])
        if value is not None and not fits(value):
            raise UserError(f"{flag(name)} is {shown(value)}: expected {words}")


def check_types(config: Any) -> None:
    """Raises `UserError` if a field of a dataclass has a value of another type than it declares."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        if not _is(value := getattr(config, name), hint):
            raise UserError(f"{flag(name)} is {shown(value)}, which has the wrong type")


def _is(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _is(value, inner[0])
    if kind in (Union, types.UnionType):
        return any(_is(value, one) for one in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind is tuple:
        fits = isinstance(value, tuple) and len(value) == len(inner)
        return fits and all(map(_is, value, inner))
    if hint in (int, float):  # True is no number, and an int is a float, too
        return type(value) in (int, hint)
    return isinstance(value, hint)
