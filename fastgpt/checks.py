"""Checks of single settings, whose errors name the flag, what was given and what was expected."""

from collections.abc import Callable
from typing import Any

from fastgpt.errors import UserError

POSITIVE = ("a number greater than 0", lambda x: 0 < x < float("inf"))
NOT_NEGATIVE = ("0 or more", lambda x: 0 <= x < float("inf"))
INT64 = ("0 to 2^63 - 1", lambda x: 0 <= x < 2**63)
FRACTION = ("a fraction in [0, 1)", lambda x: 0 <= x < 1)
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
            raise UserError(f"{flag(name)} is {value}: expected {words}")
