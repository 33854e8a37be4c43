"""Runs a file: its Triton kernels are compiled for a GPU and executed on the CPU.

    python -m simgpu.executor yourfile.py --arch 90
    python -m simgpu.executor yourfile.py:check --arch 90

The first runs the file as a script, the second calls a function of it without arguments. Kernels
are launched as usual, `kernel[grid](...)`, with CPU tensors. Exits with 1 and one line if a kernel
does what it must not: an access outside of a tensor, a race, a missing wait.
"""

import argparse
import runpy
import sys
import time
from collections import Counter
from pathlib import Path

from simgpu.executor.errors import FaultError, UnknownPtxError
from simgpu.executor.launch import executed_on_cpu

ARCHS = (80, 86, 89, 90, 100, 120)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    kind = argparse.RawDescriptionHelpFormatter
    name = "python -m simgpu.executor"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=kind)
    parser.add_argument("file", metavar="FILE[:FUNCTION]", help="file that launches kernels")
    parser.add_argument("--arch", type=int, default=90, choices=ARCHS, help="GPU arch [90]")
    args = parser.parse_args(argv)

    from triton import knobs  # after --help, which needs no Triton

    if knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    path, _, function = args.file.partition(":")
    if not Path(path).is_file():
        parser.error(f"there is no file {path}")
    began = time.perf_counter()
    try:
        with executed_on_cpu(args.arch) as launches:
            found = runpy.run_path(path, run_name="kernels_of" if function else "__main__")
            if function and not callable(found.get(function)):
                parser.error(f"{path} has no function {function}")
            if function:
                found[function]()
    except (FaultError, UnknownPtxError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    if not launches:
        parser.error(f"{args.file} launched no kernel")
    counts = Counter(launch.kernel.__name__ for launch in launches)
    what = ", ".join(f"{kernel} {count}x" for kernel, count in counts.items())
    print(f"sm_{args.arch}: {what}: no fault, {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
