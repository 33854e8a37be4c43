"""Profiles the compiled kernels of an op without a GPU, by counting what they do when executed.

    python -m kernels.proof.profile attention --arch 90 --shape gpt2-124m [--sizes T=512 B=2]

The kernels run on the CPU, for a problem that is cut to sizes of at most MOST: the same PTX as for
the whole one, so the same tiles, warps, dtype and masks, and so the same work for each thread block
in a pass of its loops. What is counted, and how: `simgpu.executor.counters`. Passes that only poll
an mbarrier (sm_100) depend on time; here they are those of threads that run in turn.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..runtime import INTERPRETING, Launch, executing, family
from ..spec import Problem, Spec
from ..specs import SPECS
from .compile import specialised
from .fenced import NAMES, Counters, execute
from .rules import aligned
from .sass import DEVICES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST = {"B": 1, "T": 256, "H": 2, "K": 2, "M": 132}
"""Largest sizes that are executed unless --sizes asks for others."""


def profile(
    spec: Spec, problem: Problem, dtype: torch.dtype, arch: int
) -> Mapping[tuple[str, str], Counters]:
    """Executes forward and backward of an op; returns counts by kernel and what it is compiled for.

    The counts of a kernel are those of all of its launches.
    """
    counters: dict[tuple[str, str], Counters] = {}

    def run(launch: Launch) -> None:
        key = launch.kernel.__name__, repr(specialised(launch))
        execute(launch, arch, counters=counters.setdefault(key, Counters()))

    def make(*sizes: int, below: int = 0) -> Tensor:
        x = torch.empty(sizes, dtype=torch.int64 if below else dtype)
        return x.random_(below) if below else x.normal_()

    with executing(arch, run, DEVICES[arch].multiprocessors):
        inputs = spec.inputs(problem, make)
        floats = [x for x in inputs.values() if x.is_floating_point()]
        for x in floats:
            x.requires_grad_(spec.differentiable)
        found = spec.call(spec.op, problem, "cpu")(*inputs.values())
        outputs = found if isinstance(found, tuple) else (found,)
        outputs = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, floats, [torch.ones_like(x) for x in outputs])
    return counters


# --- command --------------------------------------------------------------------------------------

Cells = Callable[[Counters, slice, float], list[str]]
"""Function that formats the counts of some basic blocks, divided by a number of passes."""


def instructions(c: Counters, blocks: slice, passes: float) -> list[str]:
    pipes = c.pipes(blocks)
    counts = (sum(pipes.values()), *(pipes[name] for name in NAMES), c.barriers(blocks))
    return [f"{n / passes:,.0f}" for n in counts]


def memory(c: Counters, blocks: slice, passes: float) -> list[str]:
    cells = [f"{c.total(field, blocks) / passes / 1e6:,.4g}" for field in ("touched", "bytes")]
    for field in ("sectors", "wavefronts"):
        n, least = c.total(field, blocks), c.total(f"least_{field}", blocks)
        cells += [f"{n / passes:,.0f}", f"{n / least:.3f}" if least else "-"]
    return [*cells, f"{c.total('multiply_adds', blocks) / passes:,.0f}"]


def table(
    head: tuple[str, ...], profiles: Iterable[tuple[tuple[str, str], Counters]], cells: Cells
) -> str:
    """Formats counts of each kernel, and of a thread block in a pass of each of its loops."""
    lines = [("kernel", "times", *head)]
    for (kernel, _), c in profiles:
        times = f"{c.thread_blocks:,} blocks of {c.warps} warps"
        lines.append((kernel, times, *cells(c, slice(None), 1)))
        for loop in c.loops():
            passes = max(1.0, c.passes(loop))
            times = f"{passes / c.thread_blocks:.2f} passes a block"
            name = f"  a block's pass, {loop.source}"
            lines.append((name, times, *cells(c, loop.blocks, passes)))
    return aligned(lines)


def sized(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not name or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a size such as T=512")
    return name, int(size)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.proof.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("op", choices=SPECS, metavar="OP", help=f"one of {', '.join(SPECS)}")
    add("--arch", type=family, default=90, choices=DEVICES, help="GPU arch [90]")
    add("--shape", default="", metavar="LABEL", help="the problem, as the Spec has it [its first]")
    add("--sizes", type=sized, nargs="+", default=[], metavar="NAME=N", help="sizes to execute")
    add("--dtype", default="bf16", choices=DTYPES, help="dtype of the tensors [bf16]")
    args = parser.parse_args(argv)
    if INTERPRETING:
        parser.error("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    spec = SPECS[args.op]
    shapes = {**spec.sizes["cuda"], **spec.problems} if spec.random is None else {}
    shape = args.shape or next(iter(shapes), "")
    if shape not in shapes:
        parser.error(f"--shape {shape}: {args.op} has {', '.join(shapes) or 'no shapes'}")
    whole, asked = shapes[shape], dict(args.sizes)
    if unknown := asked.keys() - whole.keys():
        parser.error(f"--sizes {min(unknown)}: {shape} has the sizes {', '.join(whole)}")
    cut = {name: min(whole[name], most) for name, most in MOST.items() if name in whole}
    problem = {**whole, **cut, **asked}
    profiles = profile(spec, problem, DTYPES[args.dtype], args.arch).items()
    passes = "forward and backward" if spec.differentiable else "forward"
    print(f"{args.op} {shape} {args.dtype} sm_{args.arch}: {passes}, executed for {problem}")
    head = ("instructions", *NAMES, "barriers")
    print(f"\nWarp instructions of PTX\n{table(head, profiles, instructions)}")
    head = ("MB, each once", "MB", "sectors", "x least", "wavefronts", "x least", "multiply-adds")
    print(f"\nMemory and products\n{table(head, profiles, memory)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
