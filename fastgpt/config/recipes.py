"""Recipes: named settings of a run, as in `python train.py shakespeare-cpu`.

They are written in `recipes.toml`.
"""

import tomllib
from pathlib import Path
from typing import Any

from fastgpt.config.config import Config, overlay

_FILE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def _settings(name: str) -> Config:
    values = {key: x for key, x in _FILE[name].items() if key not in ("like", "about")}
    like = _FILE[name].get("like")
    return overlay(_settings(like) if like else Config(), {**values, "recipe": name})


RECIPES: dict[str, tuple[str, Config]] = {
    name: (recipe["about"], _settings(name)) for name, recipe in _FILE.items()
}
"""One-line description and settings of each recipe, by name."""
