"""Command line of training: `python train.py [RECIPE] [--FLAG VALUE ...]`, or `fastgpt-train`."""

import signal
import sys
from collections.abc import Sequence

import fastgpt
from fastgpt import flags
from fastgpt.config.config import COMMON, Config
from fastgpt.config.files import to_yaml
from fastgpt.config.recipes import RECIPES
from fastgpt.display import command
from fastgpt.errors import shown_in_one_line, tell_torchrun
from fastgpt.faults import failure
from fastgpt.parallel import signals
from fastgpt.terminal import print_text
from fastgpt.train.plan import configure, find_defaults


def main(argv: Sequence[str] | None = None) -> None:
    """Runs train.py with these arguments, by default those of this process."""
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


if __name__ == "__main__":
    main()
