"""Settings in YAML files, as `--print-config` writes and `--config FILE` reads them."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from fastgpt.config.config import Config, overlay, to_json
from fastgpt.errors import UserError, reason, unknown_name


class _Loader(yaml.SafeLoader):
    """Reads words and numbers as YAML 1.2: in 1.1 `off` is false, `010` is 8 and `6e-4` is text.

    It refuses aliases, as a few lines of them can stand for more than fits into the memory, and
    keys that are there twice, as all but the last would be ignored.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _error("expected a value, not an alias", self.peek_event())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise _error(f"{key.value} is given twice: expected it once", key)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _error(said: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=said, problem_mark=at.start_mark)


_Loader.yaml_implicit_resolvers = {}
for kind, pattern in {
    "bool": "true|True|TRUE|false|False|FALSE",
    "null": "~|null|Null|NULL|",
    "int": r"[-+]?\d+",
    "float": r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"({pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def to_yaml(config: Config) -> str:
    """Writes settings as YAML, without `resume` and `run_dir` (of one command only)."""
    values = json.loads(to_json(config))
    del values["epochs" if config.epochs is None else "steps"]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the settings of a YAML file, by section.

    Raises:
        UserError: it cannot be read, or holds no settings.
    """
    try:
        found = _Loader(file.read_text(encoding="utf-8")).get_single_data() or {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"--config {file}, line {line}: {error.problem}") from error
    # an explicit tag such as !!bool or !!timestamp before what is none raises any of the others
    except (OSError, ValueError, KeyError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--config {file} cannot be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"--config {file} holds {found!r:.60}: expected settings by name")
    return found


def with_settings(config: Config, settings: dict[str, Any], file: Path | None) -> Config:
    """Replaces settings by a file's, if one is given; its steps replace a recipe's epochs.

    Raises:
        UserError: a setting is unknown, or has a wrong value.
    """
    _check_names(settings, json.loads(to_json(config)), f"{file}")
    if "steps" in settings and settings.get("epochs") is not None:
        raise UserError(f"steps and epochs are both in {file}: expected one of them")
    return overlay(config, ({"epochs": None} if "steps" in settings else {}) | settings)


def _check_names(given: dict[str, Any], known: dict[str, Any], where: str) -> None:
    for name, value in given.items():
        if name not in known:
            raise unknown_name(f"setting of {where}", str(name), known)
        if isinstance(known[name], dict) != isinstance(value, dict):
            expected = "settings by name" if isinstance(known[name], dict) else "one value"
            raise UserError(f"{name} of {where} is {value!r:.60}: expected {expected}")
        if isinstance(value, dict):
            _check_names(value, known[name], f"{name} in {where}")
