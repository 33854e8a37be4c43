"""The command line: `python train.py [recipe] [--section.field value ...]`, or `fastgpt-train`."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fastgpt import distributed, flags
from fastgpt.config import Config
from fastgpt.display import command
from fastgpt.errors import UserError, shown_in_one_line
from fastgpt.recipes import RECIPES
from fastgpt.run import find_run, saved_config

FIRST = (
    "data.source", "steps", "model.num_layers", "model.dim", "model.context",
    "train.batch_tokens", "train.micro_batch", "optim.lr", "train.device", "seed", "run_dir",
    "resume",
)  # fmt: skip
"""Flags of the short help."""


def main() -> None:
    """Runs train.py with the arguments of this process."""
    try:
        with shown_in_one_line():
            config = parse(sys.argv[1:])
            from fastgpt.trainer import Trainer  # after --help and wrong flags had their answer

            Trainer(config).fit()
    finally:
        distributed.stop()


def parse(argv: Sequence[str]) -> Config:
    """Settings of a run: the recipe's (a saved run's, with --resume), changed by the flags given.

    Prints what --help, --help-all, --list-recipes or --version asks for, and exits.

    Raises:
        UserError: unknown recipe or flag, or an impossible value.
    """
    if "--list-recipes" in argv:
        print(flags.table([(name, about) for name, (about, _) in RECIPES.items()]))
        sys.exit()
    asked = [flag for flag in argv if flag in flags.ANSWERED]
    given = [flag for flag in argv if flag not in flags.ANSWERED]
    named = bool(given) and not given[0].startswith("-")
    recipe = given.pop(0) if named else ("gpt2-124m" if torch.cuda.is_available() else "baby")
    if recipe not in RECIPES:
        raise _unknown_recipe(recipe)
    resume, run_dir = _resume_flags(given)
    found = None if resume is None else find_run(resume, run_dir, recipe)
    if found is None:
        of = f"recipe {recipe}: {RECIPES[recipe][0]}"
        return _flags(RECIPES[recipe][1], [*asked, *given], of)
    run, source = found
    saved = saved_config(run)
    if named and saved.recipe != recipe:
        raise UserError(f"{run} is a run of recipe {saved.recipe!r}: expected that, got {recipe!r}")
    config = _flags(saved, [*asked, *given], f"the run {run}")
    return replace(config, run_dir=config.run_dir or run, resume=str(source))


def _unknown_recipe(given: str) -> UserError:
    near = [name for name in RECIPES if given in name] or difflib.get_close_matches(given, RECIPES)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UserError(f"unknown recipe {given!r}; {hint}--list-recipes lists all of them")


def _resume_flags(given: list[str]) -> tuple[str | None, Path | None]:
    """--resume and --run-dir, which decide the default values of all other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume")
    parser.add_argument("--run-dir", "--run_dir", type=Path)
    try:
        known, _ = parser.parse_known_args(given)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}") from error
    return known.resume, known.run_dir


def _flags(default: Config, given: list[str], of: str) -> Config:
    start = command("python train.py")
    for before, name in zip(["", *given], given):
        if name in RECIPES and not (before.startswith("--") and "=" not in before):
            raise UserError(f"recipe {name!r} comes first: {start} {name} --flag value ...")
    config = flags.parse(
        Config,
        given,
        prog=start,
        first=FIRST,
        usage="[RECIPE] [--FLAG VALUE ...]",
        default=default,
        about="Trains a GPT. Without a recipe it is gpt2-124m where torch sees CUDA, else baby. "
        f"[In brackets]: the values of {of}.",
        more=f"Recipes: {', '.join(RECIPES)}. --list-recipes tells what each is. {flags.MORE}",
    )
    return _one_length(config, given)


def _one_length(config: Config, argv: list[str]) -> Config:
    """`config` without the recipe's epochs where --steps replaces them."""
    given = {flag.split("=")[0].replace("_", "-") for flag in argv}
    for steps, epochs in (("steps", "epochs"), ("eval_every", "eval_epochs")):
        names = (f"--{steps.replace('_', '-')}", f"--{epochs.replace('_', '-')}")
        if given.issuperset(names):
            raise UserError(f"{names[0]} and {names[1]} are both given: expected one of them")
        if names[0] in given:
            config = replace(config, **{epochs: None})
    return config
