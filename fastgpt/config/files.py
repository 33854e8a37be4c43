"""Settings in YAML files, as `--print-config` writes and `--config FILE` reads them."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from fastgpt.config.config import Config, overlay, to_json
from fastgpt.errors import UserError, reason, unknown_name


class _Loader(yaml.SafeLoader):
    """Reads `6e-4` as a number, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


INSTEAD = {"steps": "epochs", "eval_every": "eval_epochs"}
"""Settings that are given in one of two ways."""


def to_yaml(config: Config) -> str:
    """Writes settings as YAML, without `resume` and `run_dir` (of one command only)."""
    values = json.loads(to_json(config))
    for steps, epochs in INSTEAD.items():
        del values[steps if values[epochs] is not None else epochs]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the settings of a YAML file, by section.

    Raises:
        UserError: it cannot be read, or holds no settings.
    """
    try:
        found = _Loader(file.read_text(encoding="utf-8")).get_single_data() or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--config {file} cannot be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"--config {file} holds {found!r:.60}: expected settings by name")
    return found


def with_settings(config: Config, settings: dict[str, Any], file: Path | None) -> Config:
    """Replaces settings by those of a file, if there is one; its steps replace a recipe's epochs.

    Raises:
        UserError: a setting is unknown, or has a wrong value.
    """
    known = json.loads(to_json(config))
    for name, values in settings.items():
        if name not in known:
            raise unknown_name(f"setting of {file}", str(name), known)
        sections = isinstance(known[name], dict), isinstance(values, dict)
        if sections[0] != sections[1]:
            expected = "settings by name" if sections[0] else "one value"
            raise UserError(f"{name} of {file} is {values!r:.60}: expected {expected}")
        if wrong := [inner for inner in values if inner not in known[name]] if sections[1] else ():
            raise unknown_name(f"setting of {name} in {file}", str(wrong[0]), known[name])
    for steps, epochs in INSTEAD.items():
        if steps in settings and settings.get(epochs) is not None:
            raise UserError(f"{steps} and {epochs} are both in {file}: expected one of them")
        if steps in settings:
            settings = {epochs: None, **settings}
    return overlay(config, settings)
