"""The command line: `train.py [recipe] [--section.field value ...]` to a `Config`."""

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace

import torch
import tyro

from fastgpt.config import Config
from fastgpt.errors import UserError, unknown_name
from fastgpt.recipes import RECIPES
from fastgpt.run import find_run, saved_config


def parse(argv: Sequence[str]) -> Config:
    """The settings of a run: the recipe's (a saved run's, with --resume), under the flags given.

    Raises:
        UserError: unknown recipe or field, or a value that cannot be.
    """
    named = bool(argv) and not argv[0].startswith("-")
    recipe = argv[0] if named else ("gpt2-124m" if torch.cuda.is_available() else "baby")
    if recipe not in RECIPES:
        raise unknown_name("recipe", recipe, RECIPES)
    flags = list(argv[1:] if named else argv)
    config = _flags(RECIPES[recipe][1], flags)
    if config.resume is None:
        return config
    found = find_run(config.resume, config.run_dir, recipe)
    if found is None:
        return replace(config, resume=None)
    run, source = found
    saved = saved_config(run)
    if named and saved.recipe != recipe:
        raise UserError(f"{run} is a run of recipe {saved.recipe!r}: expected that, got {recipe!r}")
    resumed = _flags(saved, flags)
    return replace(resumed, run_dir=resumed.run_dir or run, resume=str(source))


def _flags(default: Config, flags: list[str]) -> Config:
    recipes = "\n".join(f"  {name:<24}{about}" for name, (about, _) in RECIPES.items())
    config, unknown = tyro.cli(
        Config,
        prog="python train.py [recipe]",
        description="Trains a GPT. Recipes (none named: gpt2-124m with CUDA, baby without):\n\n"
        + recipes,
        default=default,
        args=flags,
        return_unknown_args=True,
    )
    if unknown:
        name = unknown[0].split("=")[0]
        near = difflib.get_close_matches(name.replace("_", "-"), _flag_names(default), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists the fields"
        raise UserError(f"unknown argument {name!r}; {hint}")
    return config


def _flag_names(section: object, prefix: str = "--") -> list[str]:
    names = []
    for field in fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        name = prefix + field.name.replace("_", "-")
        names += _flag_names(value, f"{name}.") if is_dataclass(value) else [name]
    return names
