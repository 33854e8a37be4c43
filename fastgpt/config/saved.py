"""Settings that a run has saved, and their differences."""

import json
from pathlib import Path
from typing import Any

from fastgpt.config.config import Config, from_json, to_json
from fastgpt.errors import UserError, reason

CONVERTED = "converted"
"""Recipe of a run that was converted from another program's model."""


def saved_config(run: Path) -> Config:
    """Reads the settings of a run or a checkpoint from its config.json.

    Raises:
        UserError: it cannot be read.
    """
    path = run / "config.json"
    try:
        return from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def changes(before: Config, after: Config) -> list[str]:
    """Lists the settings that differ, as `name old -> new`."""
    old, new = flat(before), flat(after)
    return [f"{name} {old[name]} -> {new[name]}" for name in new if old[name] != new[name]]


def flat(config: Config) -> dict[str, Any]:
    """Returns the settings by the names of their fields, such as `model.num_layers`."""
    found = {}
    for name, value in json.loads(to_json(config)).items():
        nested = value if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{inner}".rstrip("."): x for inner, x in nested.items()}
    return found
