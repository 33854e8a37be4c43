"""Types and bounds of settings, which the fields of a dataclass declare.

An error names the flag, what was given and what was expected.
"""

import types
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fastgpt.errors import UserError, shown

INFINITE = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Bounds of a number, declared at its field, as in `lr: Annotated[float, POSITIVE] = 6e-4`."""

    words: str
    """Words for the error: the number that is expected."""
    gt: float = -INFINITE
    ge: float = -INFINITE
    lt: float = INFINITE
    le: float = INFINITE

    def __contains__(self, number: float) -> bool:
        return self.gt < number < self.lt and self.ge <= number <= self.le


POSITIVE = Range(words="a number greater than 0", gt=0)
NOT_NEGATIVE = Range(words="0 or more", ge=0)
INT64 = Range(words="0 to 2^63 - 1", ge=0, lt=2**63)
FRACTION = Range(words="a fraction in [0, 1)", ge=0, lt=1)
SHARE = Range(words="a number from 0 to 1", ge=0, le=1)
SIZE = Range(words=f"1 to {2**22:,}", ge=1, le=2**22)
"""Size of a model: larger ones would ask for memory, or overflow, before a file is refused."""


def flag(name: str) -> str:
    """Returns the flag that sets the field `name`: `--model.num-layers` for `model.num_layers`."""
    return f"--{name.replace('_', '-')}"


def check_fields(config: Any, section: str = "") -> None:
    """Raises `UserError` unless each field has its type and lies in its `Range`, or is None.

    Args:
        config: a dataclass.
        section: what stands before the names of its flags, such as `model.`.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if not _is(value, hint):
            raise UserError(f"{flag(section + name)} is {shown(value)}, which has the wrong type")
        for bounds in getattr(hint, "__metadata__", ()):
            if isinstance(bounds, Range) and value is not None and value not in bounds:
                raise UserError(
                    f"{flag(section + name)} is {shown(value)}: expected {bounds.words}"
                )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _is(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _is(value, inner[0])
    if kind in (Union, types.UnionType):
        return any(_is(value, one) for one in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind is tuple:
        inner = inner[:1] * len(value) if inner[1:] == (...,) else inner
        fits = isinstance(value, tuple) and len(value) == len(inner)
        return fits and all(map(_is, value, inner))
    if hint in (int, float):  # True is no number, and an int is a float, too
        return type(value) in (int, hint)
    return isinstance(value, hint)
