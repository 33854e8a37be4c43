"""Command line of training: `python train.py [RECIPE] [--FLAG VALUE ...]`, or `fastgpt-train`."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import fastgpt
from fastgpt import flags
from fastgpt.commands import command
from fastgpt.config.config import COMMON, CONVERTED, Config
from fastgpt.config.files import read_settings, to_yaml, with_settings
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.saved import saved_config
from fastgpt.errors import UsageError, UserError, shown_in_one_line, tell_torchrun, unknown_name
from fastgpt.faults import failure
from fastgpt.parallel import signals
from fastgpt.run.directory import find_run
from fastgpt.terminal import print_text
from fastgpt.train.init_from import with_architecture

FOREIGN_FLAGS = {
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


def main(argv: Sequence[str] | None = None) -> None:
    """Runs train.py with these arguments, by default the process's own."""
    argv = sys.argv[1:] if argv is None else argv
    with failure.abort_all_ranks(), shown_in_one_line():
        with shown_in_one_line(status=2):
            if (text := answer(argv)) is not None:
                print_text(text)
                return
            config = configure(argv)
        from fastgpt.train.trainer import Trainer  # slow to import: not for --help or wrong flags

        trainer = Trainer(config)
        trainer.fit()
        if trainer.requeue:  # torchrun sends SIGTERM as soon as one rank has left with that status
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            trainer.world.barrier()
            tell_torchrun(f"stopped by SIGUSR1 and saved: exit status {signals.REQUEUE}")
    if trainer.requeue:
        sys.exit(signals.REQUEUE)


def answer(argv: Sequence[str]) -> str | None:
    """Returns the answer to --help, --list-recipes, --print-config or --version, if one is asked.

    Raises:
        UserError: as `configure`.
    """
    if "--version" in argv:
        return f"fastgpt {fastgpt.__version__}"
    if "--list-recipes" in argv:
        return "\n".join(f"  {name:<22} {about}" for name, (about, _) in RECIPES.items())
    if "--print-config" in argv:
        return to_yaml(configure([word for word in argv if word != "--print-config"])).rstrip()
    if asked := {"-h", "--help", "--help-all"} & {*argv}:
        words = [word for word in argv if word not in asked]
        default, of, _ = find_defaults(words, header=False)
        return flags.help_text(
            Config,
            default,
            prog=f"{command('python train.py')} [RECIPE]",
            about="Trains a GPT. The default recipe is gpt2-124m where torch sees CUDA, else baby."
            " --list-recipes lists the recipes, and --help-all all flags. --print-config prints the"
            f" settings as YAML, and --config FILE reads them. The flags' defaults come from {of}.",
            common=() if "--help-all" in asked else COMMON,
        )
    return None


def configure(argv: Sequence[str]) -> Config:
    """Returns the settings that a command line `[RECIPE] [--FLAG VALUE ...]` asks for.

    Raises:
        UserError: unknown recipe, flag or run, or an impossible value.
    """
    default, _, words = find_defaults(argv)
    names = [word.split("=")[0].replace("_", "-") for word in words]
    if found := [name for name in names if name.startswith("--") and name[2:] in FOREIGN_FLAGS]:
        ours = ", ".join(f"{name} is {FOREIGN_FLAGS[name[2:]]}" for name in found)
        raise UserError(f"flags of other programs, which have other names here: {ours}")
    prog = f"{command('python train.py')} [RECIPE]"
    config = flags.parse(Config, words, prog=prog, default=default, first="one recipe")
    if {"--steps", "--epochs"} <= {*names}:
        raise UserError("--steps and --epochs are both given: expected one of them")
    if "--steps" in names:
        config = replace(config, epochs=None)
    if default.resume is not None:  # not the word `auto`, but the run that it found
        return replace(config, resume=default.resume)
    return config


def find_defaults(argv: Sequence[str], header: bool = True) -> tuple[Config, str, list[str]]:
    """Finds the defaults of a command line's flags: a recipe's, a model's, a file's or a run's.

    Args:
        header: False to leave out the architecture of the model that --init-from names.

    Returns:
        tuple[Config, str, list[str]]: the defaults, where they come from, and the words of the
            flags and their values.
    """
    words = [*argv]
    named = words.pop(0) if words and not words[0].startswith("-") else None
    given, words = _pop_value(words, "--config")
    if given == "":
        raise UsageError("--config has no value: expected a file with settings")
    file = None if given is None else Path(given)
    settings = {} if file is None else read_settings(file)
    in_file = settings.pop("recipe", named)
    if named not in (None, in_file):
        raise UserError(f"{file} is of recipe {in_file}: expected that, not {named}")
    recipe = in_file or ("gpt2-124m" if torch.cuda.is_available() else "baby")
    if str(recipe) not in RECIPES:
        raise unknown_name("recipe", str(recipe), RECIPES, also="--config FILE")
    about, plain = RECIPES[recipe]
    about = f"recipe {recipe}: {about}" if file is None else f"{file}, of recipe {recipe}"
    resume, run_dir, init_from = (
        _pop_value(words, flag)[0] or None for flag in ("--resume", "--run-dir", "--init-from")
    )
    if resume is not None and file is not None:
        raise UserError(f"--config is {file}: a resumed run has its settings: expected flags alone")
    if resume is not None and (
        found := find_run(resume, Path(run_dir) if run_dir else None, recipe)
    ):
        run, path = found
        saved = _saved(run, resume, init_from, in_file)
        return replace(saved, run_dir=run, resume=str(path)), f"the run {run}", words
    init_from = init_from or settings.get("init_from", plain.init_from)
    if header and init_from not in (None, "None"):
        plain = with_architecture(plain, str(init_from))
    return with_settings(plain, settings, file), about, words


def _pop_value(words: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Returns the value of a flag that decides the defaults of the others, and the other words.

    Without a value it is an empty text; None: the flag is not given.
    """
    for at, word in reversed([*enumerate(words)]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            rest = words[at + 1 :]
            if not equals and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            return value, words[:at] + rest
    return None, words


def _saved(run: Path, resume: str, init_from: str | None, recipe: str | None) -> Config:
    """Returns the settings of a run that is resumed, after checks of what was given with it."""
    saved = saved_config(run)
    if saved.recipe == CONVERTED:
        raise UserError(
            f"{run} cannot be resumed: it was converted from another program's model, and has no"
            f" optimizer state: start a new run from it with --init-from {run}"
        )
    continues = resume == "auto" and init_from == saved.init_from
    if init_from not in (None, "None") and not continues:
        raise UserError(
            f"--init-from is {init_from}: {run} is resumed, which began with"
            f" {saved.init_from}: expected no --init-from, or another --run-dir without --resume"
        )
    if recipe not in (None, saved.recipe):
        raise UserError(f"{run} is a run of recipe {saved.recipe!r}: expected that, not {recipe!r}")
    return saved


if __name__ == "__main__":
    main()
