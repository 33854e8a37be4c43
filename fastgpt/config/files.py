"""Settings in YAML files, as `--print-config` writes and `--config FILE` reads them."""

import io
import json
from pathlib import Path
from typing import Any

from fastgpt.config.config import Config, overlay, to_json
from fastgpt.errors import UserError, reason


def to_yaml(config: Config) -> str:
    """Writes settings as YAML, without `resume` and `run_dir` (of one command only)."""
    from ruamel.yaml import YAML  # only files of settings need it

    values = json.loads(to_json(config))
    del values["epochs" if config.epochs is None else "steps"]
    yaml, written = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(values, written)
    return written.getvalue()


def read_settings(file: Path) -> dict[str, Any]:
    """Reads the settings of a YAML 1.2 file, by section.

    Raises:
        UserError: it cannot be read, or holds no settings.
    """
    from ruamel.yaml import YAML, AliasEvent, composer
    from ruamel.yaml.error import MarkedYAMLError

    class Composer(composer.Composer):
        """Refuses aliases: a few lines of them can stand for more than fits into the memory."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.parser.check_event(AliasEvent):
                mark = self.parser.peek_event().start_mark
                raise MarkedYAMLError(problem="expected a value, not an alias", problem_mark=mark)
            return super().compose_node(parent, index)

    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = Composer
    yaml.max_depth = 20  # of brackets in brackets, before they exceed Python's stack
    try:
        found = yaml.load(file.read_text(encoding="utf-8")) or {}
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"--config {file}, line {line}: {error.problem}") from error
    except Exception as error:  # of any type, where !!bool stands before another word
        raise UserError(f"--config {file} cannot be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"--config {file} holds {found!r:.60}: expected settings by name")
    return found


def with_settings(config: Config, settings: dict[str, Any], file: Path | None) -> Config:
    """Replaces settings by a file's, if one is given; its steps replace a recipe's epochs.

    Raises:
        UserError: a setting is unknown, or has a wrong value.
    """
    if "steps" in settings and settings.get("epochs") is not None:
        raise UserError(f"steps and epochs are both in {file}: expected one of them")
    settings = ({"epochs": None} if "steps" in settings else {}) | settings
    return overlay(config, settings, f"{file}")
