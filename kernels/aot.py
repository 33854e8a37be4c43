"""Compiles every shipped configuration of every kernel, without a GPU, and checks the machine code.

    python -m kernels.aot [--op norm] [--arch 80 90] [--only TEXT ...] [--changed] [--static]

The `variants` of each op's `Spec` call its launchers with tensors on the meta device, and
`runtime.launch` records what they would launch on a device of that arch, so what is compiled here
is what is launched there: the same table look-ups, constexprs, warps, stages and specialisations. A
case also declares which tensor-core instruction its matrix products must become.

A configuration is chosen by a table or a rule for a kernel on an arch: block sizes, warps, stages,
a bound on registers. A variant is a configuration compiled for one dtype and set of options.

The exit status is 1 for a spilled register, more shared memory than the arch has, a kernel without
its declared instruction, a loop that waits for a load that it has just asked for, and more
registers, shared memory or instructions than recorded in kernels/proof/budget.json (kept for each
minor version of Triton, whose ptxas decides; written by --record). The budget also keeps a
fingerprint of each variant's sources and settings: --changed compiles the variants whose
fingerprint differs, and one variant of each kernel and arch; on an arch without recorded budgets
these alone. --static adds the load of each unit in each main loop and the speed limit that follows
(kernels.proof.sass). sm_103 and 121 count as sm_100 and 120.
"""

import argparse
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .proof.compile import CompileResult, Config, collect, compile_all, fingerprint
from .proof.sass import DEVICES, UNITS, ceiling
from .runtime import INTERPRETING, family
from .specs import VARIANTS

TUNED = (80, 90, 100)
"""Archs with attention tables of their own."""
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory a block can have: CUDA C++ Programming Guide, compute capabilities."""
ARCHS = tuple(SHARED_LIMIT)
MAY_WAIT = re.compile(
    r"float32|D=256|sm_90 \S+dkv_kernel D=64 \w+ docs|sm_100 \S+fwd_kernel D=(80|128 \w+ docs)"
    r"|sm_100 \S+dkv_kernel D=(16|32|64 \w+ docs|80|128)"
)
"""Variants on TUNED archs whose loops may wait for a load that they have just asked for: one more
stage spills (with Triton 3.6 or 3.7), does not fit, or leaves room for one block less."""
BUDGET = Path(__file__).parent / "proof" / "budget.json"


# --- check ----------------------------------------------------------------------------------------


Budget = dict[str, list[Any]]
"""Recorded resource use of each kernel variant, by `key`: [registers per thread, bytes of shared
memory, instructions, hash of the compiler's input]."""


def check_budget(row: CompileResult, budget: Budget) -> list[str]:
    """Lists what is wrong with a compiled variant: errors, spills, more resources than recorded."""
    if row.error:
        return [f"does not compile: {row.error}"]
    problems = []
    if row.spilled:
        problems.append(f"spills {row.spilled} bytes")
    if row.shared > (limit := SHARED_LIMIT[family(row.arch)]):
        problems.append(f"{row.shared} bytes of shared memory > {limit}")
    if row.declared and not any(name.startswith(row.declared) for name in row.mma):
        problems.append(f"has no {row.declared}")
    waits = any(loop.waits for loop in row.loops) and row.arch in TUNED
    if waits and not MAY_WAIT.search(f"sm_{row.arch} {row.key}"):
        problems.append("waits for a load that it has just asked for")
    used = {
        "registers": row.registers,
        "bytes of shared memory": row.shared,
        "instructions": row.instructions,
    }
    for (what, n), recorded in zip(used.items(), budget.get(row.key, ())):
        if n > recorded:
            problems.append(f"{n} {what} > {recorded} recorded")
    return problems


def triton_minor() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def read_budgets(path: Path) -> dict[str, dict[str, Budget]]:
    """Reads the recorded resource use: {minor version of Triton: {architecture: budget}}."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def record(rows: Iterable[CompileResult], path: Path) -> None:
    """Writes the resources that `rows` use into the file of budgets; other keys stay."""
    budgets = read_budgets(path)
    mine = budgets.setdefault(triton_minor(), {})
    for row in rows:
        if not row.error:
            mine.setdefault(str(row.arch), {})[row.key] = [
                row.registers,
                row.shared,
                row.instructions,
                row.fingerprint,
            ]
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(budgets, indent=1, sort_keys=True)
    one_line = r'\[\s+(\d+),\s+(\d+),\s+(\d+),\s+("\w*")\s+\]'
    text = re.sub(one_line, r"[\1, \2, \3, \4]", text)
    path.write_text(text + "\n", encoding="utf-8")


# --- command --------------------------------------------------------------------------------------


def table(rows: Iterable[CompileResult]) -> str:
    lines: list[tuple[str, ...]] = [
        ("kernel", "arch", "configuration", "warps", "stages", "regs", "spilled", "shared", "mma")
    ]
    for r in rows:
        mma = " ".join(f"{name} {n}" for name, n in r.mma.items())
        numbers = (r.warps, r.stages, r.registers, r.spilled, r.shared)
        lines.append((r.kernel, f"sm_{r.arch}", r.config, *map(str, numbers), mma or "-"))
    return aligned(lines)


def aligned(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines)


def static_table(rows: Iterable[CompileResult]) -> str:
    """Formats a table of innermost loops: a warp's instructions per iteration, and the speed."""
    units = (*UNITS, "alu", "uniform")
    lines = [("kernel", "arch", "configuration", "loop", *units,
              "blocks/SM", "warps/SM", "bound", "clocks", "TFLOP/s", "GB/s")]  # fmt: skip
    for r in rows:
        for loop in r.loops:
            top = ceiling(loop, r.arch, r.warps, r.registers, r.shared, r.columns)
            if top is None:
                continue
            figures = (top.blocks, top.blocks * r.warps, top.bound, f"{top.clocks:.0f}",
                       f"{top.tflops:.0f}" if top.tflops else "-", f"{top.gbytes:.0f}")  # fmt: skip
            counts = (loop.units.get(unit, 0) for unit in units)
            name = (r.kernel, f"sm_{r.arch}", r.config, f"{loop.start:04x}")
            lines.append((*name, *map(str, counts), *map(str, figures)))
    stated = (f"sm_{a}: {d.multiprocessors} SMs at {d.ghz} GHz" for a, d in DEVICES.items())
    return f"{aligned(lines)}\n{', '.join(stated)}"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.aot",
        usage="%(prog)s [--FLAG VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", type=family, nargs="+", default=ARCHS, choices=SHARED_LIMIT, help="GPU archs")
    add("--op", nargs="+", metavar="OP", help="only the kernels of these folders, such as norm")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="only names that contain a TEXT")
    add("--changed", action="store_true", help="what changed, and one variant of each kernel")
    add("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    add("--static", action="store_true", help="show the speed limit of each main loop")
    add("--record", action="store_true", help="save these rows as the new budget")
    add("--budget", type=Path, default=BUDGET, help="file of the budget (default: the shipped one)")
    add("--modules", nargs="+", metavar="NAME", help="compile the `variants` of these modules")
    add("--jobs", type=int, default=os.cpu_count(), help="compilations at a time [cores]")
    return parser.parse_args(argv)


def select(args: argparse.Namespace) -> list[Config]:
    variants = [importlib.import_module(name).variants for name in args.modules or ()] or VARIANTS
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attention was never tuned")
        collected = list(collect(variants, args.arch))
    configs = [c for c in collected if any(text in f"{c.kernel} {c.label}" for text in args.only)]
    if args.op:
        configs = [c for c in configs if c.launch.kernel.fn.__module__.split(".")[-2] in args.op]
    if args.changed:
        first = {id(c) for c in {(c.kernel, c.arch): c for c in reversed(configs)}.values()}
        recorded = read_budgets(args.budget).get(triton_minor(), {})
        configs = [c for c in configs if id(c) in first or changed(c, recorded)]
    return configs


def changed(config: Config, recorded: dict[str, Budget]) -> bool:
    """Returns True if a variant of a recorded arch is new or has another input of the compiler."""
    rows = recorded.get(str(config.arch))
    return rows is not None and rows.get(config.key, [])[3:] != [fingerprint(config)]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if INTERPRETING:
        print("kernels.aot: unset TRITON_INTERPRET, because the interpreter compiles nothing")
        return 2
    configs = select(args)
    if not configs:
        asked = f"--op {' '.join(args.op)}" if args.op else f"--only {' '.join(args.only)}"
        print(f"kernels.aot: no configuration matches {asked}")
        return 2
    rows = list(compile_all(configs, args.jobs))
    for config, row in zip(configs, rows, strict=True):
        row.fingerprint = fingerprint(config)
    if args.record:
        record(rows, args.budget)
    budget = read_budgets(args.budget).get(triton_minor(), {})
    for row in rows:
        row.problems = check_budget(row, budget.get(str(row.arch), {}))
    print(table(rows))
    if args.static:
        print(f"\n{static_table(rows)}\n")
    if args.json:
        document = {"triton": triton_minor(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in rows if row.problems]
    for row in wrong:
        print(f"sm_{row.arch} {row.key}: {'; '.join(row.problems)}")
    unknown = sum(row.key not in budget.get(str(row.arch), {}) for row in rows)
    settings = len({config.settings for config in configs})
    cure = " (make budget ARGS=--record writes it)" if unknown else ""
    print(
        f"{len(rows)} variants of {settings} configurations, {len(wrong)} wrong, "
        f"{unknown} without a recorded budget{cure}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
