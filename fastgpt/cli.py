"""The command line: `python train.py [recipe] [--section.field value ...]`, or `fastgpt-train`."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from fastgpt import distributed
from fastgpt.config import Config
from fastgpt.display import command
from fastgpt.errors import UserError, shown_in_one_line, unknown_name
from fastgpt.recipes import RECIPES
from fastgpt.run import find_run, saved_config


def main() -> None:
    """Trains what the process's command line asks for."""
    try:
        with shown_in_one_line():
            config = parse(sys.argv[1:])
            from fastgpt.trainer import Trainer  # after --help and wrong flags had their answer

            Trainer(config).fit()
    finally:
        distributed.stop()


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
    resume, run_dir = _resume_flags(flags)
    found = None if resume is None else find_run(resume, run_dir, recipe)
    if found is None:
        return _flags(RECIPES[recipe][1], flags)
    run, source = found
    saved = saved_config(run)
    if named and saved.recipe != recipe:
        raise UserError(f"{run} is a run of recipe {saved.recipe!r}: expected that, got {recipe!r}")
    config = _flags(saved, flags)
    return replace(config, run_dir=config.run_dir or run, resume=str(source))


def _resume_flags(flags: list[str]) -> tuple[str | None, Path | None]:
    """--resume and --run-dir, which say what the defaults of all other flags are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume")
    parser.add_argument("--run-dir", "--run_dir", type=Path)
    try:
        known, _ = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}") from error
    return known.resume, known.run_dir


def _flags(default: Config, flags: list[str]) -> Config:
    recipes = "\n".join(f"  {name:<24}{about}" for name, (about, _) in RECIPES.items())
    config, unknown = tyro.cli(
        Config,
        prog=f"{command('python train.py')} [recipe]",
        description="Trains a GPT. Recipes (none named: gpt2-124m with CUDA, baby without):\n\n"
        + recipes,
        default=default,
        args=flags,
        return_unknown_args=True,
    )
    if unknown:
        name = unknown[0].split("=")[0]
        if name in RECIPES:
            start = f"{command('python train.py')} {name}"
            raise UserError(f"recipe {name!r} comes first: {start} --flag value ...")
        near = difflib.get_close_matches(name.replace("_", "-"), _flag_names(default), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists the fields"
        raise UserError(f"unknown argument {name!r}; {hint}")
    return _one_length(config, flags)


def _one_length(config: Config, flags: list[str]) -> Config:
    """Steps that were given take the place of a recipe's epochs."""
    given = {flag.split("=")[0].replace("_", "-") for flag in flags}
    for steps, epochs in (("steps", "epochs"), ("eval_every", "eval_epochs")):
        names = (f"--{steps.replace('_', '-')}", f"--{epochs.replace('_', '-')}")
        if given.issuperset(names):
            raise UserError(f"{names[0]} and {names[1]} are both given: expected one of them")
        if names[0] in given:
            config = replace(config, **{epochs: None})
    return config


def _flag_names(section: Any, prefix: str = "--") -> list[str]:
    names = []
    for field in fields(section):
        value = getattr(section, field.name)
        name = prefix + field.name.replace("_", "-")
        names += _flag_names(value, f"{name}.") if is_dataclass(value) else [name]
    return names
