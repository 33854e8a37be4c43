"""Compiles every shipped configuration of every kernel, without a GPU, and judges the machine code.

    python -m kernels.aot [--arch 80 90 100] [--only TEXT ...] [--one] [--json out.json] [--record]

A module with kernels is named in MODULES and has one function,

    def aot_cases(arch: int) -> Iterator[Case]

whose cases call the module's launchers with tensors on the meta device. `runtime.launch` records
what they would launch on a device of that arch, so what is compiled here is what is launched there:
the same table look-ups, constexprs, warps, stages and specialisations. A case also declares which
tensor-core instruction its matrix products must become.

Exits 1 on a spilled register, on more shared memory than the arch has, on a kernel without its
declared instruction, and on more registers or shared memory than recorded in kernels/tuning/
budget.json (kept for each minor version of Triton, whose ptxas decides; written by --record).
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernels.runtime import INTERPRETING, Launch, recording
from kernels.sass import disassemble, tensor_core_instructions

MODULES = ("kernels.norm_launch",)
ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory one block can have: CUDA C++ Programming Guide, compute capabilities."""
BUDGET = Path(__file__).with_name("tuning") / "budget.json"


@dataclass(frozen=True, slots=True)
class Case:
    """One shipped configuration of one op's pass.

    Args:
        label: names the configuration within its kernels: "N=768 bf16 bias".
        run: calls launchers with tensors on the meta device; nothing is computed.
        mma: kernel name -> prefix of the SASS instruction that must occur: "HGMMA" (wgmma, sm_90),
            "HMMA" (mma.sync), "UTC" (tcgen05, sm_100). A kernel that is not named needs none.
    """

    label: str
    run: Callable[[], object]
    mma: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Config:
    """What the compiler is given for one launch."""

    arch: int
    label: str
    declared: str
    launch: Launch

    @property
    def kernel(self) -> str:
        return self.launch.kernel.__name__


@dataclass(slots=True)
class Row:
    """What the compiler made of a `Config`."""

    kernel: str
    arch: int
    config: str
    warps: int = 0
    stages: int = 0
    registers: int = 0
    spilled: int = 0
    """Bytes of stack: none of our kernels has local arrays, so all of it is spilled registers."""
    shared: int = 0
    mma: dict[str, int] = field(default_factory=dict)
    declared: str = ""
    error: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.config}"


# --- collect --------------------------------------------------------------------------------------


def collect(modules: Iterable[str], archs: Iterable[int]) -> Iterator[Config]:
    """The launches of every case, those that the compiler would not tell apart only once."""
    seen = set()
    for arch in archs:
        for module in modules:
            for case in importlib.import_module(module).aot_cases(arch):
                with recording(arch) as launches:
                    case.run()
                for launch in launches:
                    name = launch.kernel.__name__
                    key = (arch, name, repr(_specialised(launch)))
                    if key not in seen:
                        seen.add(key)
                        yield Config(arch, case.label, case.mma.get(name, ""), launch)


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict, dict[str, Any]]:
    """(signature, constexprs, attributes, options) as Triton's launcher would derive them."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    kernel = launch.kernel
    values = dict(zip(kernel.arg_names, launch.args)) | launch.meta
    signature, constexprs, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values.pop(param.name)
        kind, key = "constexpr", value
        if not param.is_constexpr:
            kind, key = native_specialize_impl(
                CUDABackend,
                value,
                False,
                not param.do_not_specialize,
                not param.do_not_specialize_on_alignment,
            )
        signature[param.name] = kind
        if kind == "constexpr":
            constexprs[param.name] = key
        elif key:
            attributes[(i,)] = CUDABackend.parse_attr(key)
    return signature, constexprs, attributes, values


# --- compile --------------------------------------------------------------------------------------


def compile_config(config: Config) -> Row:
    """Compiles one configuration for its arch and reads its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attributes, options = _specialised(config.launch)
    source = ASTSource(config.launch.kernel, signature, constexprs, attributes)
    try:
        target = GPUTarget("cuda", config.arch, 32)
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # of whichever of the compiler's passes: the others still get a row
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Row(config.kernel, config.arch, config.label, error=message)
    text = disassemble(compiled.asm["cubin"])
    usage = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    metadata: Any = compiled.metadata
    return Row(
        kernel=config.kernel,
        arch=config.arch,
        config=config.label,
        warps=metadata.num_warps,
        stages=metadata.num_stages,
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        shared=metadata.shared,
        mma=tensor_core_instructions(text),
        declared=config.declared,
    )


# --- judge ----------------------------------------------------------------------------------------


def judge(row: Row, budget: Mapping[str, list[int]]) -> list[str]:
    """What is wrong with a row; `budget` maps `Row.key` to [registers, shared bytes]."""
    if row.error:
        return [f"does not compile: {row.error}"]
    problems = []
    if row.spilled:
        problems.append(f"spills {row.spilled} bytes")
    if row.shared > SHARED_LIMIT[row.arch]:
        problems.append(f"{row.shared} bytes of shared memory > {SHARED_LIMIT[row.arch]}")
    if row.declared and not any(name.startswith(row.declared) for name in row.mma):
        problems.append(f"has no {row.declared}")
    registers, shared = budget.get(row.key, (row.registers, row.shared))
    if row.registers > registers:
        problems.append(f"{row.registers} registers > {registers} recorded")
    if row.shared > shared:
        problems.append(f"{row.shared} bytes of shared memory > {shared} recorded")
    return problems


def triton_minor() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def read_budgets(path: Path) -> dict[str, dict[str, dict[str, list[int]]]]:
    """{Triton's minor version: {arch: {`Row.key`: [registers, shared bytes]}}}."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def record(rows: Iterable[Row], path: Path) -> None:
    """Writes what the rows use as the budget of this version of Triton; other rows stay."""
    budgets = read_budgets(path)
    mine = budgets.setdefault(triton_minor(), {})
    for row in rows:
        if not row.error:
            mine.setdefault(str(row.arch), {})[row.key] = [row.registers, row.shared]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n", encoding="utf-8")


# --- command --------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> str:
    head = (
        "kernel",
        "arch",
        "configuration",
        "warps",
        "stages",
        "regs",
        "spilled",
        "shared",
        "mma",
    )
    lines = [head]
    for r in rows:
        mma = " ".join(f"{name} {n}" for name, n in r.mma.items())
        numbers = (r.warps, r.stages, r.registers, r.spilled, r.shared)
        lines.append((r.kernel, f"sm_{r.arch}", r.config, *map(str, numbers), mma or "-"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, choices=SHARED_LIMIT)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="rows that contain one"
    )
    parser.add_argument("--one", action="store_true", help="one configuration per kernel and arch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--record", action="store_true", help="make the rows the budget")
    parser.add_argument("--budget", type=Path, default=BUDGET, help="other than the shipped one")
    parser.add_argument("--modules", nargs="+", default=MODULES, help="whose aot_cases to compile")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compile at a time")
    return parser.parse_args(argv)


def select(args: argparse.Namespace) -> list[Config]:
    configs = [
        c
        for c in collect(args.modules, args.arch)
        if any(text in f"{c.kernel} {c.label}" for text in args.only)
    ]
    if args.one:
        configs = list({(c.kernel, c.arch): c for c in reversed(configs)}.values())[::-1]
    return configs


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if INTERPRETING:
        print("kernels.aot: unset TRITON_INTERPRET; the interpreter compiles nothing")
        return 2
    configs = select(args)
    if not configs:
        print(f"kernels.aot: no configuration matches --only {' '.join(args.only)}")
        return 2
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(compile_config, configs))
    if args.record:
        record(rows, args.budget)
    budget = read_budgets(args.budget).get(triton_minor(), {})
    for row in rows:
        row.problems = judge(row, budget.get(str(row.arch), {}))
    print(table(rows))
    if args.json:
        document = {"triton": triton_minor(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in rows if row.problems]
    for row in wrong:
        print(f"sm_{row.arch} {row.key}: {'; '.join(row.problems)}")
    unknown = sum(row.key not in budget.get(str(row.arch), {}) for row in rows)
    print(f"{len(rows)} configurations, {len(wrong)} wrong, {unknown} without a recorded budget")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
