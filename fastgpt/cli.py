"""Command line of training: `python train.py [RECIPE] [--FLAG VALUE ...]`, or `fastgpt-train`."""

import argparse
import difflib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fastgpt import flags
from fastgpt.config.config import Config
from fastgpt.config.recipes import RECIPES
from fastgpt.config.saved import CONVERTED, saved_config
from fastgpt.convert.source import OpenedModel, read
from fastgpt.display import command
from fastgpt.errors import UserError, shown_in_one_line, tell_torchrun
from fastgpt.faults import failure
from fastgpt.parallel import signals
from fastgpt.run.directory import find_run
from fastgpt.terminal import print_text
from fastgpt.train.init_from import check_architecture, with_architecture

FIRST = (
    "data.source", "steps", "model.num_layers", "model.dim", "model.context",
    "train.batch_tokens", "train.micro_batch", "optim.lr", "optim.muon_lr", "train.device",
    "seed", "run_dir", "resume", "init_from",
)  # fmt: skip
"""Flags that --help shows; that of Muon only where Muon is the optimizer."""


def main() -> None:
    """Runs train.py with the arguments of this process."""
    with failure.abort_all_ranks(), shown_in_one_line():
        config, source = parse_with_source(sys.argv[1:])
        from fastgpt.train.trainer import Trainer  # slow to import: not for --help or wrong flags

        trainer = Trainer(config, source=source)
        trainer.fit()
        trainer.display.output.close()
        if trainer.requeue:  # torchrun sends SIGTERM as soon as one rank has left with that status
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            trainer.world.barrier()
            tell_torchrun(f"stopped by SIGUSR1 and saved: exit status {signals.REQUEUE}")
    if trainer.requeue:
        sys.exit(signals.REQUEUE)


def parse(argv: Sequence[str]) -> Config:
    """Returns the settings of a run: the recipe's (with --resume the saved run's) and the flags.

    With --help, --help-all, --list-recipes or --version it prints the answer and exits.

    Raises:
        UserError: unknown recipe or flag, or an impossible value.
    """
    return parse_with_source(argv)[0]


def parse_with_source(argv: Sequence[str]) -> tuple[Config, OpenedModel | None]:
    """Parses as `parse` does; also returns the model that --init-from names.

    Its architecture decides the defaults of the other flags, so it is opened here, once.
    """
    if "--list-recipes" in argv:
        print_text(flags.table([(name, about) for name, (about, _) in RECIPES.items()]))
        sys.exit()
    asked = [flag for flag in argv if flag in flags.ANSWERED]
    given = [flag for flag in argv if flag not in flags.ANSWERED]
    named = bool(given) and not given[0].startswith("-")
    recipe = given.pop(0) if named else ("gpt2-124m" if torch.cuda.is_available() else "baby")
    if recipe not in RECIPES:
        raise _unknown_recipe(recipe)
    early = _early_flags(given)
    found = None if early.resume is None else find_run(early.resume, early.run_dir, recipe)
    if found is None:
        return _new_run(recipe, early.init_from, given, asked)
    run, checkpoint = found
    saved = saved_config(run)
    _check_resumed(run, saved, early)
    if named and saved.recipe != recipe:
        raise UserError(f"{run} is a run of recipe {saved.recipe!r}: expected that, not {recipe!r}")
    config = _flags(saved, [*asked, *given], f"the run {run}")
    return replace(config, run_dir=config.run_dir or run, resume=str(checkpoint)), None


def _new_run(
    recipe: str, init_from: str | None, given: list[str], asked: list[str]
) -> tuple[Config, OpenedModel | None]:
    about, default = RECIPES[recipe]
    of = f"recipe {recipe}: {about}"
    init_from = default.init_from if init_from is None else init_from
    if init_from in (None, "None") or asked:
        return _flags(default, [*asked, *given], of), None
    source = read(init_from)
    config = _flags(with_architecture(default, init_from, source.config), given, of)
    check_architecture(config, source.config)
    return config, source


def _check_resumed(run: Path, saved: Config, early: argparse.Namespace) -> None:
    if saved.recipe == CONVERTED:
        raise UserError(
            f"{run} cannot be resumed: it was converted from another program's model, and has no"
            f" optimizer state: start a new run from it with --init-from {run}"
        )
    continues = early.resume == "auto" and early.init_from == saved.init_from
    if early.init_from is not None and not continues:
        raise UserError(
            f"--init-from is {early.init_from}: {run} is resumed, which began with"
            f" {saved.init_from}: expected no --init-from, or another --run-dir without --resume"
        )


def _unknown_recipe(given: str) -> UserError:
    near = [name for name in RECIPES if given in name] or difflib.get_close_matches(given, RECIPES)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UserError(f"unknown recipe {given!r}; {hint}--list-recipes lists all recipes")


def _early_flags(given: list[str]) -> argparse.Namespace:
    """Parses --resume, --run-dir and --init-from, which decide the defaults of all other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--run-dir", "--run_dir", type=Path, nargs="?")
    parser.add_argument("--init-from", "--init_from", nargs="?")
    return parser.parse_known_args(given)[0]


def _flags(default: Config, given: list[str], of: str) -> Config:
    start = command("python train.py")
    for before, name in zip(["", *given], given):
        if name in RECIPES and not (before.startswith("--") and "=" not in before):
            raise UserError(f"recipe {name!r} must come first: {start} {name} --flag value ...")
    config = flags.parse(
        Config,
        given,
        prog=start,
        first=FIRST if default.optim.kind == "muon" else [f for f in FIRST if f != "optim.muon_lr"],
        usage="[RECIPE] [--FLAG VALUE ...]",
        default=default,
        about="Trains a GPT. The default recipe is gpt2-124m where torch sees CUDA, else baby. "
        f"Defaults [in brackets] are those of {of}.",
        more=f"Recipes: {', '.join(RECIPES)}. --list-recipes describes them. {flags.MORE}",
    )
    return _one_length(config, given)


def _one_length(config: Config, argv: list[str]) -> Config:
    """Drops the recipe's epochs where --steps or --eval-every replaces them."""
    given = {flag.split("=")[0].replace("_", "-") for flag in argv}
    for steps, epochs in (("steps", "epochs"), ("eval_every", "eval_epochs")):
        names = (f"--{steps.replace('_', '-')}", f"--{epochs.replace('_', '-')}")
        if given.issuperset(names):
            raise UserError(f"{names[0]} and {names[1]} are both given: expected one of them")
        if names[0] in given:
            config = replace(config, **{epochs: None})
    return config
