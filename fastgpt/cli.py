"""Command line of training: `python train.py [RECIPE] [--FLAG VALUE ...]`, or `fastgpt-train`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fastgpt import flags
from fastgpt.config.config import COMMON, CONVERTED, Config, saved_config
from fastgpt.config.files import read_settings, to_yaml, with_settings
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.source import OpenedModel, read
from fastgpt.display import command
from fastgpt.errors import UserError, shown_in_one_line, tell_torchrun, unknown_name
from fastgpt.faults import failure
from fastgpt.parallel import signals
from fastgpt.run.directory import find_run
from fastgpt.terminal import print_text
from fastgpt.train.init_from import check_architecture, with_architecture

OTHERS = {
    "batch-size": "--train.micro-batch", "per-device-train-batch-size": "--train.micro-batch",
    "gradient-accumulation-steps": "--train.batch-tokens (tokens in a step)",
    "max-iters": "--steps", "num-train-epochs": "--epochs", "learning-rate": "--optim.lr",
    "warmup-iters": "--optim.warmup-steps", "weight-decay": "--optim.weight-decay",
    "block-size": "--model.context", "n-embd": "--model.dim", "n-layer": "--model.num-layers",
    "n-head": "--model.num-heads", "wandb": "--track wandb", "wandb-log": "--track wandb",
    "dataset": "--data.source", "eval-interval": "--eval-every", "out-dir": "--run-dir",
    "output-dir": "--run-dir", "compile": "--train.compile", "dtype": "--train.precision",
    "device": "--train.device", "max-steps": "--steps", "log-interval": "--log-every",
}  # fmt: skip
"""Flags of nanoGPT and of Hugging Face's Trainer, and ours for the same."""


def main() -> None:
    """Runs train.py with the arguments of this process."""
    with failure.abort_all_ranks(), shown_in_one_line():
        with shown_in_one_line(status=2):
            config, source = parse_with_source(sys.argv[1:])
        from fastgpt.train.trainer import Trainer  # slow to import: not for --help or wrong flags

        trainer = Trainer(config, source=source)
        trainer.fit()
        if trainer.requeue:  # torchrun sends SIGTERM as soon as one rank has left with that status
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            trainer.world.barrier()
            tell_torchrun(f"stopped by SIGUSR1 and saved: exit status {signals.REQUEUE}")
    if trainer.requeue:
        sys.exit(signals.REQUEUE)


def parse(argv: Sequence[str]) -> Config:
    """Returns the settings of a run: the recipe's (with --resume the saved run's) and the flags.

    With --help, --list-recipes, --print-config or --version it prints the answer and exits.

    Raises:
        UserError: unknown recipe or flag, or an impossible value.
    """
    return parse_with_source(argv)[0]


def parse_with_source(argv: Sequence[str]) -> tuple[Config, OpenedModel | None]:
    """Parses as `parse` does; also returns the model that --init-from names.

    Its architecture decides the defaults of the other flags, so it is opened here, once.
    """
    if "--list-recipes" in argv:
        print_text("\n".join(f"  {name:<22} {about}" for name, (about, _) in RECIPES.items()))
        sys.exit()
    if "--print-config" in argv:
        print_text(to_yaml(parse([flag for flag in argv if flag != "--print-config"])).rstrip())
        sys.exit()
    asked = [flag for flag in argv if flag in ("--help", "-h", "--help-all", "--version")]
    given = [flag for flag in argv if flag not in asked]
    named = given.pop(0) if given and not given[0].startswith("-") else None
    file, given = _config_file(given)
    settings = {} if file is None else read_settings(file)
    in_file = settings.pop("recipe", named)
    if named not in (None, in_file):
        raise UserError(f"{file} is of recipe {in_file}: expected that, not {named}")
    named = in_file
    recipe = named or ("gpt2-124m" if torch.cuda.is_available() else "baby")
    if str(recipe) not in RECIPES:
        raise unknown_name("recipe", str(recipe), RECIPES, also="--config FILE")
    about, plain = RECIPES[recipe]
    about = f"recipe {recipe}: {about}" if file is None else f"{file}, of recipe {recipe}"
    default = with_settings(plain, settings, file)
    early = _early_flags(given)
    if file is not None and early.resume is not None:
        raise UserError(f"--config is {file}: a resumed run has its settings: expected flags alone")
    if early.resume is not None and (found := find_run(early.resume, early.run_dir, recipe)):
        run, checkpoint = found
        saved = _saved(run, early, named)
        config = _flags(saved, [*asked, *given], f"the run {run}")
        return replace(config, run_dir=config.run_dir or run, resume=str(checkpoint)), None
    init_from = default.init_from if early.init_from is None else early.init_from
    if init_from in (None, "None") or asked:
        return _flags(default, [*asked, *given], about), None
    source = read(init_from)
    plain = with_architecture(plain, init_from, source.config)
    config = _flags(with_settings(plain, settings, file), given, about)
    check_architecture(config, source.config)
    return config, source


def _config_file(given: list[str]) -> tuple[Path | None, list[str]]:
    """Returns the file that --config names, and the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="?", const=Path())
    found, others = parser.parse_known_args(given)
    if found.config == Path():
        raise UserError("--config has no value: expected a file with settings")
    return found.config, others


def _early_flags(given: list[str]) -> argparse.Namespace:
    """Parses --resume, --run-dir and --init-from, which decide the defaults of all other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--run-dir", "--run_dir", type=Path, nargs="?")
    parser.add_argument("--init-from", "--init_from", nargs="?")
    return parser.parse_known_args(given)[0]


def _saved(run: Path, early: argparse.Namespace, recipe: str | None) -> Config:
    """Returns the settings of a run that is resumed, after checks of what was given with it."""
    saved = saved_config(run)
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
    if recipe not in (None, saved.recipe):
        raise UserError(f"{run} is a run of recipe {saved.recipe!r}: expected that, not {recipe!r}")
    return saved


def _flags(default: Config, given: list[str], of: str) -> Config:
    """Parses the flags over `default`; drops its epochs where --steps is given."""
    names = [flag.split("=")[0].replace("_", "-") for flag in given]
    if found := [name for name in names if name.startswith("--") and name[2:] in OTHERS]:
        ours = ", ".join(f"{name} is {OTHERS[name[2:]]}" for name in found)
        raise UserError(f"flags of other programs, which have other names here: {ours}")
    config = flags.parse(
        Config,
        given,
        prog=f"{command('python train.py')} [RECIPE]",
        default=default,
        about="Trains a GPT. The default recipe is gpt2-124m where torch sees CUDA, else baby."
        " --list-recipes lists the recipes, and --help-all all flags. --print-config prints the"
        f" settings as YAML, and --config FILE reads them. The flags' defaults come from {of}.",
        first="one recipe",
        common=COMMON,
    )
    if {"--steps", "--epochs"} <= {*names}:
        raise UserError("--steps and --epochs are both given: expected one of them")
    return replace(config, epochs=None) if "--steps" in names else config


if __name__ == "__main__":
    main()
