"""Types and bounds of settings, which the fields of a dataclass declare.

An error names the flag, what was given and what was expected.
"""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

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
        within = self.gt < number < self.lt and self.ge <= number <= self.le
        return within and not isinstance(number, bool)


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


_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "text", Path: "a path",
          NoneType: "None", Ellipsis: "..."}  # fmt: skip


def expected(hint: Any) -> str:
    """Writes the type of a field in words, for an error."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return " or ".join(map(str, inner))
    if kind is Annotated:
        return expected(inner[0])
    if kind is tuple:
        return f"a list ({', '.join(map(expected, inner))})"
    return _WORDS.get(hint) or " or ".join(map(expected, inner)) or str(hint)


def check_fields(config: Any, section: str = "") -> None:
    """Raises `UserError` unless each field has its type and lies in its `Range`, or is None.

    The `section`, such as `model.`, stands before the names of the dataclass's flags.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        try:
            check_type(value, hint, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except TypeCheckError as error:
            said = f"{flag(section + name)} is {shown(value)}: expected {expected(hint)}"
            raise UserError(said) from error
        for bounds in getattr(hint, "__metadata__", ()):
            if isinstance(bounds, Range) and value is not None and value not in bounds:
                raise UserError(
                    f"{flag(section + name)} is {shown(value)}: expected {bounds.words}"
                )
