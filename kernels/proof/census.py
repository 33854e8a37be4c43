"""Writes what the installed Triton makes of our kernels into a JSON file, for `kernels.upgrade`.

    python -m kernels.proof.census --out FILE [--brief] [--arch 90] [--op norm] [--problems 3]

Of each variant that ships it notes resources, instructions, fences and the static ceiling of its
main loops; of each op's problems, executed on the CPU, the digest and the error of every output
and gradient, and faults. A line for each kernel and op is printed as it is done.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..aot import ARCHS, check_budget
from ..parity import complaints, errors, outputs_and_gradients
from ..runtime import executing, family
from ..spec import Problem, Spec
from ..specs import SPECS, VARIANTS
from .compile import CompileResult, Config, collect, compile_all
from .fenced import execute
from .sass import ceiling

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Say = Callable[[str], None]


def loud(text: str) -> None:
    print(text, flush=True)


# --- compiled -------------------------------------------------------------------------------------


def measured(row: CompileResult) -> dict[str, Any]:
    """Returns the figures of a compiled variant by name; {"error": text} if it did not compile."""
    if row.error:
        return {"error": row.error}
    tops = [ceiling(x, row.arch, row.warps, row.registers, row.shared, row.columns)
            for x in row.loops]  # fmt: skip
    known = [top for top in tops if top]
    return {
        "registers": row.registers,
        "spilled": row.spilled,
        "shared": row.shared,
        "columns": row.columns,
        "instructions": row.instructions,
        "units": row.units,
        "mma": row.mma,
        "fences": row.fences,
        "blocks": min((top.blocks for top in known), default=0),
        "clocks": round(sum(top.clocks / max(1, top.blocks) for top in known), 1),
        "problems": check_budget(row, {}),
    }


def compiled(configs: Sequence[Config], jobs: int | None, say: Say) -> dict[str, dict[str, Any]]:
    """Compiles configurations; returns the figures of each by "sm_90 kernel label"."""
    found = {}
    rows = compile_all(configs, jobs)
    for (kernel, arch), group in groupby(rows, lambda row: (row.kernel, row.arch)):
        before = len(found)
        for row in group:
            found[f"sm_{arch} {row.key}"] = measured(row)
        say(f"sm_{arch} {kernel}: {len(found) - before} compiled")
    return found


# --- executed -------------------------------------------------------------------------------------


def digest(x: Tensor) -> str:
    """Hashes the bits of a tensor."""
    bits = x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()[:12]


def executed(spec: Spec, problem: Problem, dtype: torch.dtype, archs: Sequence[int]) -> Iterator:
    """Runs an op's compiled forward and backward on the CPU; yields (arch, what came of it).

    Inputs are random numbers of seed 0; the error is measured as `kernels.parity` does.
    """
    random = torch.Generator().manual_seed(0)

    def make(*sizes: int, below: int = 0) -> Tensor:
        if below:
            return torch.randint(below, sizes, generator=random)
        return torch.randn(sizes, generator=random).to(dtype)

    def draw(_: int, y: Tensor) -> Tensor:
        return torch.randn(y.shape, generator=torch.Generator().manual_seed(1))

    def called(f: Callable[..., Any], dtype: torch.dtype) -> dict[str, Tensor]:
        bound = spec.call(f, problem, "cpu")

        def on_copies(*tensors: Tensor) -> Any:  # some ops overwrite an input
            return bound(*[x.clone() for x in tensors])

        return outputs_and_gradients(
            on_copies, inputs, dtype, draw if spec.differentiable else None
        )

    inputs = spec.inputs(problem, make)
    truth, eager = called(spec.ref, torch.float64), called(spec.eager, dtype)
    for arch in archs:
        try:
            with executing(arch, lambda launch, arch=arch: execute(launch, arch)):
                got = called(spec.op, dtype)
        except Exception as error:  # a fault, or any compiler pass; other problems still run
            yield arch, {"fault": f"{type(error).__name__}: {' '.join(str(error).split())}"}
            continue
        yield (
            arch,
            {
                "digests": {name: digest(x) for name, x in got.items()},
                "errors": {name: errors(x, truth[name])[1] for name, x in got.items()},
                "wrong": complaints(got, eager, truth, dtype, spec.terms(problem)),
            },
        )


def all_executed(
    specs: Sequence[Spec], archs: Sequence[int], most: int | None, brief: bool, say: Say
) -> dict[str, dict[str, Any]]:
    """Executes the first `most` problems of each op, None for all; with `brief` in bf16 alone."""
    found = {}
    for spec in specs:
        before = len(found)
        for label, problem in list(spec.problems.items())[:most]:
            for name, dtype in list(DTYPES.items())[: 1 if brief else None]:
                for arch, result in executed(spec, problem, dtype, archs):
                    found[f"sm_{arch} {spec.name} {label} {name}"] = result
        say(f"{spec.name}: {len(found) - before} executed")
    return found


# --- command --------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.proof.census", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--brief", action="store_true")
    add("--arch", type=family, nargs="+", choices=ARCHS)
    add("--op", nargs="+")
    add("--problems", type=int)
    add("--modules", nargs="+", default=())
    add("--jobs", type=int, default=os.cpu_count())
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    import triton

    args = parse_args(argv)
    archs = args.arch or ([90] if args.brief else [80, 90, 100])
    modules = [importlib.import_module(name) for name in args.modules]
    specs = {spec.name: spec for module in modules for spec in getattr(module, "SPECS", ())}
    specs = list((specs if modules else SPECS).values())
    if args.op:
        specs = [spec for spec in specs if spec.inputs.__module__.split(".")[-2] in args.op]
    variants = [module.variants for module in modules] or VARIANTS
    configs = sorted(collect(variants, archs), key=lambda config: (config.arch, config.kernel))
    if args.op:
        configs = [c for c in configs if c.launch.kernel.fn.__module__.split(".")[-2] in args.op]
    if args.brief:
        configs = list({(c.kernel, c.arch): c for c in reversed(configs)}.values())[::-1]
    specs, most = (
        [spec for spec in specs if spec.random is None],
        1 if args.brief else args.problems,
    )
    document = {
        "triton": triton.__version__,
        "forms": compiled(configs, args.jobs, loud),
        "results": all_executed(specs, archs, most, args.brief, loud),
    }
    args.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
