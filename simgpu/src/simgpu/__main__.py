"""Runs a program on simulated GPUs: `python -m simgpu [--arch 90] [--gpus 2] script.py args...`."""

import argparse
import os
import sys

from simgpu import environment, size


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; exits where it names no program."""
    parser = argparse.ArgumentParser(prog="python -m simgpu", description=__doc__)
    parser.add_argument("--arch", type=int, default=90, help="90 for sm_90 (the default), ...")
    parser.add_argument("--gpus", type=int, default=1, help="how many (1)")
    parser.add_argument("--memory", type=size, default=size("2GiB"), help="of each (2GiB)")
    parser.add_argument("--fail", default="", help="calls that fail, such as cudaMalloc:3")
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, as Python's")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script.py and its arguments")
    asked = parser.parse_args(argv)
    if not asked.program:
        parser.error("no program: expected script.py, or -m module")
    return asked


def main() -> None:
    """Replaces this process by the program."""
    asked = arguments()
    try:
        variables = environment(asked.arch, asked.gpus, asked.memory, asked.fail)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    command = [sys.executable, *(["-m"] if asked.module else []), *asked.program]
    os.execve(sys.executable, command, os.environ | variables)


if __name__ == "__main__":
    main()
