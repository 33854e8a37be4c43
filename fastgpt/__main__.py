"""`python -m fastgpt`: lists the commands."""

from fastgpt.errors import UserError, run_command
from fastgpt.terminal import print_text

COMMANDS = {
    "cli [RECIPE]": "train a model, as train.py does",
    "prepare SOURCE --out DIR": "tokenize a corpus, for many runs",
    "data DIR": "show and check prepared data",
    "doctor [RECIPE]": "check this machine, or if a run fits",
    "sample RUN": "write text, or chat",
    "serve MODEL": "serve a model over HTTP, with a page",
    "evaluate MODEL": "score a model on texts or tasks",
    "report RUN": "write a page about runs",
    "compare A B": "show what differs between two runs",
    "convert SOURCE TARGET": "convert from or to other formats",
}


def main(argv: list[str]) -> None:
    """Prints one line for each command."""
    if unknown := {*argv} - {"-h", "--help"}:
        given = f"python -m fastgpt lists commands, but is given {unknown.pop()}"
        raise UserError(f"{given}: expected a module, as in python -m fastgpt.sample")
    for usage, about in COMMANDS.items():
        print_text(f"python -m fastgpt.{usage:<26}{about}")
    print_text("Each shows its flags with --help.")


if __name__ == "__main__":
    run_command(main, error_status=2)
