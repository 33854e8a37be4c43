"""`python -m fastgpt.doctor [RECIPE]`: what is wrong with this machine; whether a run fits.

The flags are read by argparse, because tyro may be missing like torch.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from fastgpt.doctor.checks import CHECKS, FAILED, OK, PROBLEM, WARNING, Finding, of
from fastgpt.errors import UserError, counted, run_command, writing
from fastgpt.files import write_atomically
from fastgpt.require_torch import repaired, require_torch
from fastgpt.terminal import one_line, print_text

ABOUT = """Checks this machine. With RECIPE, or a file such as run.yaml, checks whether that run
fits, and how long it takes; settings of train.py may follow. Exit status: 0 if there is no problem
(there may be warnings), 1 if there is one, 2 if a flag is wrong."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def of_machine() -> Iterator[Finding]:
    """Runs each check in a process of its own, which a broken library or kernel may end."""
    for name in CHECKS:
        try:
            with ProcessPoolExecutor(1) as pool:
                found = pool.submit(of, name).result()
        except BrokenProcessPool:
            ended = f"{FAILED}: a library ended its process, or memory was full"
            found = [Finding(name, PROBLEM, ended, repaired())]
        yield from found
        if name == "versions" and found[0].found.startswith(FAILED):
            return  # the others import torch, too


def main(argv: list[str]) -> int:
    """Runs the command line `argv`, and returns the exit status."""
    named, given = (argv[:1], argv[1:]) if argv and argv[0][:1] != "-" else ([], argv)
    usage = "python -m fastgpt.doctor [RECIPE] [options]"
    parser = Parser(usage=usage, description=ABOUT, allow_abbrev=False)
    parser.add_argument("--json", help="File for the findings as JSON; - prints them.")
    parser.add_argument("--gpu", default="", help="GPU, such as h100, or its memory in GB.")
    parser.add_argument("--gpus", type=int, help="Number of GPUs; by default those that are here.")
    parser.add_argument("--tok-per-s", type=float, help="Tokens per second of all GPUs together.")
    asked, settings = parser.parse_known_args(given)
    if not named and (settings or asked.gpu or {asked.gpus, asked.tok_per_s} != {None}):
        raise UserError(f"{' '.join(given)}: expected a recipe before it, or --json alone")
    out = Path("-" if asked.json is None else asked.json).expanduser()
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(f"--json is {asked.json!r}: expected a file in a folder that exists, or -")
    found, kept = of_machine(), []
    if named:
        require_torch()
        from fastgpt.doctor.plan import of_run

        found = of_run(named[0], settings, asked.gpu, asked.gpus, asked.tok_per_s)
    for x in found:
        kept.append(x)
        cure = f"\n{'':9}cure: {one_line(x.cure)}" if x.cure else ""
        if asked.json != "-":
            print_text(f"{x.state:<8} {x.check}: {one_line(x.found)}{cure}")
    count = {state: sum(x.state == state for x in kept) for state in (PROBLEM, WARNING, OK)}
    faults = (counted(count[state], state) for state in (PROBLEM, WARNING))
    text = json.dumps({"counts": count, "findings": [asdict(x) for x in kept]}, indent=1)
    print_text(text if asked.json == "-" else f"{', '.join(faults)}, {count[OK]} ok")
    if asked.json not in (None, "-"):
        with writing(out):
            write_atomically(out, text.encode())
    return int(count[PROBLEM] > 0)


if __name__ == "__main__":
    run_command(main, error_status=2)
