"""Reports what the installed Triton makes of our kernels, for `kernels.aot` and `kernels.upgrade`.

    python -m kernels.proof.report --out FILE [--arch 90] [--op norm] [--problems 3] [--known FILE]

Of each variant that ships it notes resources, instructions, fences and the static ceiling of its
main loops; of each op's problems, executed on the CPU, the digest and the error of every output
and gradient, and faults.
"""

import argparse
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..parity import complaints, errors, outputs_and_gradients
from ..runtime import executing, family
from ..spec import Problem, Spec
from ..specs import SPECS, VARIANTS
from .compile import CompileResult, Config, Variants, collect, compile_all, fingerprint
from .rules import ARCHS, Report, wrong

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def folder(spec: Spec) -> str:
    """Returns the name of an op's folder."""
    return spec.inputs.__module__.split(".")[-2]


OPS = sorted(set(map(folder, SPECS.values())))


# --- what is selected -----------------------------------------------------------------------------


def configs_of(
    archs: Iterable[int], ops: Sequence[str] = (), variants: Iterable[Variants] = VARIANTS
) -> list[Config]:
    """Returns the shipped variants of archs, or the variants of functions like `Spec.variants`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention was never tuned")
        found = list(collect(variants, archs))
    return [config for config in found if not ops or config.folder in ops]


def specs_of(ops: Sequence[str] = ()) -> list[Spec]:
    """Returns the specs whose results can be compared: with kernels, without random numbers."""
    found = [
        spec for spec in SPECS.values()
        if spec.random is None and spec.launches(next(iter(spec.problems.values())))
    ]  # fmt: skip
    return [spec for spec in found if not ops or folder(spec) in ops]


# --- what is reported -----------------------------------------------------------------------------


def figures(row: CompileResult) -> dict[str, Any]:
    """Returns the figures of a compiled variant that are compared."""
    tops = [top for loop in row.loops if (top := row.ceiling(loop))]
    return {
        **{name: value for name, value in asdict(row).items() if name != "loops"},
        "waits": row.waits,
        "blocks": min((top.blocks for top in tops), default=0),
        "clocks": round(sum(top.clocks / max(1, top.blocks) for top in tops), 1),
        "problems": wrong(row),
    }


def digest(x: Tensor) -> str:
    """Hashes the bits of a tensor."""
    bits = x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()[:12]


def executed(spec: Spec, problem: Problem, dtype: torch.dtype, archs: Iterable[int]) -> Any:
    """Runs an op's compiled forward and backward on the CPU; yields (arch, what came of it).

    Inputs are random numbers of seed 0; the error is measured as `kernels.parity` does.
    """
    from .fenced import execute  # needs simgpu

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

        gradients = draw if spec.differentiable else None
        return outputs_and_gradients(on_copies, inputs, dtype, gradients)

    inputs = spec.inputs(problem, make)
    truth, eager = called(spec.ref, torch.float64), called(spec.eager, dtype)
    for arch in archs:
        fault, got = "", {}
        try:
            with executing(arch, lambda launch, arch=arch: execute(launch, arch)):
                got = called(spec.op, dtype)
        except Exception as error:  # a fault, or any compiler pass; other problems still run
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield (
            arch,
            {
                "fault": fault,
                "digests": {name: digest(x) for name, x in got.items()},
                "errors": {name: errors(x, truth[name])[1] for name, x in got.items()},
                "wrong": complaints(got, eager, truth, dtype, spec.terms(problem)) if got else [],
            },
        )


def report(
    configs: Iterable[Config],
    specs: Iterable[Spec],
    archs: Sequence[int],
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    problems: Callable[[Spec], Iterable[str]] = attrgetter("structural"),
    jobs: int | None = None,
) -> Report:
    """Compiles configurations, and executes of each op the problems with some labels."""
    import triton

    results = {}
    for spec in specs:
        for label, dtype in product(problems(spec), dtypes):
            for arch, result in executed(spec, spec.problems[label], DTYPES[dtype], archs):
                results[f"sm_{arch} {spec.name} {label} {dtype}"] = result
        print(f"{spec.name}: executed", flush=True)
    forms = {row.key: figures(row) for row in compile_all(configs, jobs)}
    print(f"{len(forms)} compiled", flush=True)
    return {"triton": triton.__version__, "forms": forms, "results": results}


def unknown(configs: Iterable[Config], known: Iterable[str]) -> list[Config]:
    """Returns the configurations whose fingerprints are not known."""
    known = set(known)
    return [config for config in configs if fingerprint(config) not in known]


# --- command --------------------------------------------------------------------------------------


def flags() -> argparse.ArgumentParser:
    """Returns the flags that choose what is reported, also for `kernels.upgrade`."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--brief", action="store_true", help="one form of each kernel, one problem of each op")
    add("--arch", type=family, nargs="+", choices=ARCHS, help="GPU archs [80 90 100; brief: 90]")
    add("--op", nargs="+", default=(), metavar="OP", help="only these folders, such as norm")
    add("--problems", type=int, metavar="N", help="problems of each op to execute [all]")
    add("--jobs", type=int, default=os.cpu_count(), help="compilations at a time [cores]")
    return parser


def main(argv: list[str] | None = None) -> int:
    name = "python -m kernels.proof.report"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, parents=[flags()])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="file to write")
    add("--known", type=Path, help="fingerprints of what need not be compiled")
    add("--touched", nargs="*", default=(), help="with --known: folders of the ops to execute")
    args = parser.parse_args(argv)
    archs = args.arch or ([90] if args.brief else [80, 90, 100])
    configs, specs = configs_of(archs, args.op), specs_of(args.op)
    prints = [fingerprint(config) for config in configs]
    if args.brief:
        configs = list({(c.kernel, c.arch): c for c in reversed(configs)}.values())[::-1]
    most = 1 if args.brief else args.problems
    if args.known:
        configs = unknown(configs, json.loads(args.known.read_text(encoding="utf-8")))
        specs = [spec for spec in specs if folder(spec) in args.touched]
        found = report(configs, specs, [90], jobs=args.jobs)
    else:
        dtypes, labels = ["bf16"] if args.brief else [*DTYPES], lambda spec: [*spec.problems][:most]
        found = report(configs, specs, archs, dtypes=dtypes, problems=labels, jobs=args.jobs)
    text = json.dumps({**found, "fingerprints": prints}, indent=1, sort_keys=True)
    args.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
