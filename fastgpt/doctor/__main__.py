"""`python -m fastgpt.doctor [RECIPE]`: what is wrong with this machine; whether a run fits.

The flags are read by argparse, because tyro may be missing like torch.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from fastgpt.doctor.checks import CHECKS, OK, PROBLEM, WARNING, Finding, run
from fastgpt.errors import UserError, counted, run_command
from fastgpt.require_torch import repaired, require_torch
from fastgpt.terminal import one_line, print_text

ABOUT = """Checks this machine, or whether the run of a recipe fits and how long it takes: settings
of train.py may follow. Exit status: 1 if there is a problem, 2 if a flag is wrong, else 0."""


def of_machine() -> Iterator[Finding]:
    """Runs each check in a process of its own, which a broken library or kernel may end."""
    for check in CHECKS:
        try:
            with ProcessPoolExecutor(1) as pool:
                yield from pool.submit(run, check).result()
        except BrokenProcessPool:
            yield Finding(check.__name__, PROBLEM, "it crashed, or memory was full", repaired())


def main(argv: list[str]) -> int:
    """Runs the command line `argv`, and returns the exit status."""
    parser = argparse.ArgumentParser("python -m fastgpt.doctor", None, ABOUT, allow_abbrev=False)
    parser.add_argument("recipe", nargs="?", help="Recipe of the run.")
    parser.add_argument("--json", action="store_true", help="Prints the findings as JSON.")
    parser.add_argument("--gpu", default="", type=str.lower, help="GPU, such as h100, or its GB.")
    parser.add_argument("--gpus", type=int, default=1, help="Number of GPUs.")
    parser.add_argument("--tok-per-s", type=float, help="Tokens per second of all GPUs together.")
    asked, settings = parser.parse_known_args(argv)
    found, results = of_machine(), []
    if asked.recipe is not None:
        require_torch()
        from fastgpt.doctor.plan import of_run

        found = of_run(asked.recipe, settings, asked.gpu, asked.gpus, asked.tok_per_s)
    elif {*argv} - {"--json"}:
        raise UserError(f"{' '.join(argv)}: expected a recipe before it, or --json alone")
    for x in found:
        results.append(x)
        cure = f"\n{'':9}cure: {one_line(x.cure)}" if x.cure else ""
        if not asked.json:
            print_text(f"{x.state:<8} {x.check}: {one_line(x.found)}{cure}")
    count = Counter(x.state for x in results)
    faults = ", ".join(counted(count[state], state) for state in (PROBLEM, WARNING))
    text = json.dumps([x._asdict() for x in results], indent=1)
    print_text(text if asked.json else f"{faults}, {count[OK]} ok")
    return int(count[PROBLEM] > 0)


if __name__ == "__main__":
    run_command(main, error_status=2)
