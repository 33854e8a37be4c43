"""Settings that a run has saved."""

from pathlib import Path

from fastgpt.config.config import Config, from_json
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
