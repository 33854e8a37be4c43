"""Breaks compiled code, to see that it is noticed: `python -m tests.proof.execute.mutants`.

A mutant is one change of the PTX of one kernel: a barrier less, a wait too short, two registers
swapped. The kernel then runs in its op's parity check, all other launches as they are compiled. The
check ends with a fault or with a wrong result; or no thread reached the changed instruction; or the
mutant survived, and a reader has to find why.
"""

import argparse
import json
import random
import re
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgpt.kernels import runtime
from fastgpt.kernels.proof.execute import Compiled, FaultError, Launch, UnknownPtxError
from fastgpt.kernels.proof.execute.launch import built, compile_launch, run_launch
from fastgpt.kernels.spec import Make, Problem, Spec
from fastgpt.kernels.specs import SPECS
from tests.kernels import conformance
from tests.proof.execute.kinds import KINDS, Site, sites

SECONDS = 30
"""Limit for one check: a loop whose end was changed may have none."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# --- checks ---------------------------------------------------------------------------------------

MASKED = {"docs": 400, "window": 150, "dropout_p": 0.2}
PROBLEMS: dict[str, tuple[str | Problem, ...]] = {
    "attention": (
        {"B": 1, "T": 200, "H": 1, "D": 64},
        {"B": 2, "T": 200, "H": 2, "K": 1, "D": 64, **MASKED},
        {"B": 1, "T": 65, "Tk": 200, "H": 2, "K": 1, "D": 16},
    ),
    **{
        f"{name}_norm": ("more-tiles-than-programs", "masked-tail")
        for name in ("layer", "add_layer", "rms", "add_rms")
    },
    "cross_entropy": ("mean", "none", "in place", "rows-in-parts mean"),
    "linear_cross_entropy": ("mean", "none"),
    "bias_act": ("gelu_tanh three-dimensions", "gelu_tanh no bias"),
    "bias_act_swiglu": ("swiglu three-dimensions", "swiglu no bias"),
    "rotary": ("grouped", "tokens-in-parts"),
    "decode_attention": ("head-of-64", "pages-and-starts", "three-heads"),
}
"""Op -> what is checked: labels of the `Spec`, or problems that reach what those do not."""


def others(problem: Problem) -> Sequence[Problem]:
    """Changes of a problem's sizes to try on a survivor: an edge lies elsewhere for each thread."""
    if "lengths" in problem:
        return [{"T": 70, "lengths": (70, 33, 5)[: problem["B"]]}]
    if "T" in problem:
        return [{"T": T} for T in (5, 77, 330)]
    columns = "V" if "V" in problem else "N"
    near, power = problem[columns], 1 << (problem[columns] - 1).bit_length()
    edges = (*range(max(2, near - 9), near + 9), *range(power - 3, power))
    return [{"M": M} for M in (*range(2, 19), 600)] + [{columns: n} for n in edges]


@dataclass(frozen=True, slots=True)
class Check:
    """An op's parity check at one problem."""

    op: str
    problem: str | Problem
    dtype: str
    aligned: bool
    """Rows begin at multiples of 16 elements, so that copies are wide; else at odd addresses."""
    changed: Problem = field(default_factory=dict)
    """Sizes of the problem that are others."""

    def sizes(self) -> Problem:
        given = self.problem
        whole = SPECS[self.op].problems[given] if isinstance(given, str) else given
        return {**whole, **self.changed}

    def others(self) -> list["Check"]:
        """The check at other sizes of the problem."""
        return [replace(self, changed=change) for change in others(self.sizes())]

    def __call__(self) -> None:
        torch.manual_seed(0)
        spec = conformance.careful(SPECS[self.op])
        spec = aligned(spec) if self.aligned else spec
        conformance.parity(spec, self.sizes(), "cpu", DTYPES[self.dtype])


def aligned(spec: Spec) -> Spec:
    """A `Spec` whose inputs and upstream gradients are aligned, with poison between their rows."""

    def inputs(problem: Problem, make: Make) -> dict[str, Tensor]:
        return {name: of_wide_rows(x) for name, x in spec.inputs(problem, make).items()}

    def op(*tensors: Tensor, **options: Any) -> Any:
        ys = spec.op(*tensors, **options)
        for y in (ys,) if isinstance(ys, Tensor) else ys:
            if y.requires_grad:
                y.register_hook(of_wide_rows)
        return ys

    return replace(spec, inputs=inputs, op=op)


def of_wide_rows(x: Tensor) -> Tensor:
    """Copies x; its rows begin at multiples of 16 elements, and NaN follows each."""
    if x.dim() < 2 or not x.is_floating_point():
        return x.clone(memory_format=torch.contiguous_format)
    wide = x.new_full((*x.shape[:-1], x.shape[-1] // 16 * 16 + 16), torch.nan)
    return wide[..., : x.shape[-1]].copy_(x)


def all_checks() -> list[Check]:
    return [
        Check(op, problem, dtype, aligned)
        for op, problems in PROBLEMS.items()
        for problem in problems
        for dtype in DTYPES
        for aligned in (True, False)
    ]


class EndlessError(Exception):
    """A check took too long."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises EndlessError if what is inside takes longer."""

    def stop(*_: object) -> None:
        raise EndlessError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process: others do not count
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(check: Check, arch: int, text: str, instead: str) -> tuple[str, str]:
    """Runs a check with one kernel's text replaced: (verdict, what was noticed)."""

    def run(launch: Launch) -> None:
        kernel = compile_launch(launch, arch)
        ptx = instead if kernel.ptx == text else kernel.ptx
        run_launch(Compiled(ptx, kernel.warps, kernel.shared), launch)

    try:
        with limit(SECONDS), runtime.executing(arch, run):
            check()
    except (FaultError, UnknownPtxError, EndlessError) as fault:
        return "fault", str(fault)
    except AssertionError as error:
        return "wrong result", str(error).splitlines()[0]
    except Exception as error:  # of the executor: what it should have called a fault
        notes = getattr(error, "__notes__", ())
        return "error", " ".join((f"{type(error).__name__}: {error}", *notes))
    return "survived", ""


@dataclass(slots=True)
class Kernel:
    """A compiled kernel, and the checks that launch it."""

    name: str
    ptx: str = field(repr=False)
    checks: list[Check]


def kernels(arch: int, checks: list[Check]) -> list[Kernel]:
    """Runs checks on unchanged code, which must pass; returns the kernels that they launched."""
    found: dict[str, Kernel] = {}
    for check in checks:

        def run(launch: Launch, check: Check = check) -> None:
            compiled = compile_launch(launch, arch)
            name = launch.kernel.__name__
            kernel = found.setdefault(compiled.ptx, Kernel(name, compiled.ptx, []))
            if check not in kernel.checks:
                kernel.checks.append(check)
            run_launch(compiled, launch)

        with runtime.executing(arch, run):
            check()
    return list(found.values())


# --- mutants --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one kernel."""

    arch: int
    kernel: Kernel
    site: Site

    def facts(self) -> dict[str, Any]:
        """Returns the fields of the record that name the mutant and show its line."""
        ptx = self.kernel.ptx
        before = ptx[: self.site.start]
        line = before.count("\n") + 1
        start, end = before.rfind("\n") + 1, ptx.find("\n", self.site.end)
        return {
            "kind": self.site.kind, "arch": self.arch, "kernel": self.kernel.name,
            "ptx": f"{zlib.crc32(ptx.encode()):08x}", "line": line,
            "was": short(ptx[start:end]),
            "became": short(before[start:] + self.site.new + ptx[self.site.end : end]),
        }  # fmt: skip

    def judge(self) -> dict[str, Any]:
        """Runs the checks that launch the kernel, then those at other sizes, until one notices."""
        began, ours = time.monotonic(), self.kernel.checks
        check, verdict, said = ours[0], "survived", ""
        ptx, changed = self.kernel.ptx, self.site.apply(self.kernel.ptx)
        for check in (*ours, *(other for one in ours for other in one.others())):
            verdict, said = outcome(check, self.arch, ptx, changed)
            if verdict != "survived" and (check in ours or self.passes(check)):
                break
            verdict, said = "survived", ""
        if verdict == "survived":
            check = ours[0]
            verdict = "survived" if self.reached() else "not reached"
        found = {"check": asdict(check), "verdict": verdict, "said": said[:200]}
        return self.facts() | found | {"seconds": round(time.monotonic() - began, 1)}

    def passes(self, check: Check) -> bool:
        """Does the unchanged kernel pass?"""
        return outcome(check, self.arch, self.kernel.ptx, self.kernel.ptx)[0] == "survived"

    def reached(self) -> bool:
        """Does any thread of any check run the instruction that is changed?"""
        ptx = self.kernel.ptx
        statement = max(ptx.rfind(mark, 0, self.site.start) for mark in ";\n") + 1
        guard = re.compile(r"\s*(@!?%\w+ )?").match(ptx, statement)
        assert guard is not None
        who = "" if self.site.kind.startswith("predicate") else guard[1] or ""
        trap = f" {who}st.shared.b32 [2000000000], 0;\n"
        planted = replace(self.site, start=statement, end=statement, new=trap)
        changed = planted.apply(self.kernel.ptx)
        return any(
            outcome(check, self.arch, self.kernel.ptx, changed)[0] == "fault"
            for check in self.kernel.checks
        )


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:120]} ... {text[-35:]}"


def draw(arch: int, found: list[Kernel], kind: str, each: int, seed: int) -> list[Mutant]:
    """Draws mutants of one kind, from as many kernels as have any."""
    rng = random.Random(f"{seed} {arch} {kind}")
    places = [(kernel, list(sites(kernel.ptx, kind, rng))) for kernel in found]
    places = [(kernel, ours) for kernel, ours in places if ours]
    rng.shuffle(places)
    drawn: list[Mutant] = []
    while places and len(drawn) < each:
        kernel, ours = places.pop(0)
        drawn.append(Mutant(arch, kernel, ours.pop(rng.randrange(len(ours)))))
        if ours:
            places.append((kernel, ours))
    return drawn


def table(results: list[dict[str, Any]]) -> str:
    """The results by kind, in Markdown."""
    verdicts = ("fault", "wrong result", "survived", "not reached")
    lines = [f"| What is broken | tried | {' | '.join(verdicts)} |", "|-|-:|-:|-:|-:|-:|"]
    for kind in [*KINDS, "all"]:
        of_kind = Counter(r["verdict"] for r in results if kind in (r["kind"], "all"))
        counts = (of_kind[verdict] for verdict in verdicts)
        lines.append(f"| {kind} | {of_kind.total()} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proof.execute.mutants", description=__doc__
    )
    add = parser.add_argument
    add("--arch", type=int, nargs="+", default=[80, 90, 100], help="architectures (80 90 100)")
    add("--kind", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND", help="kinds (all)")
    add("--each", type=int, default=12, help="mutants of each kind and architecture (12)")
    add("--seed", type=int, default=0, help="seed of the draw")
    add("--json", type=Path, help="file to which a line for each mutant is added")
    args = parser.parse_args()
    if runtime.INTERPRETING:
        sys.exit("TRITON_INTERPRET is set, so nothing would be compiled; expected it unset")
    results = []
    for arch in args.arch:
        found = kernels(arch, all_checks())
        print(f"sm_{arch}: {len(found)} kernels", flush=True)
        of_kinds = [draw(arch, found, kind, args.each, args.seed) for kind in args.kind]
        rounds = zip_longest(*of_kinds)  # so that a run that is cut short has some of each kind
        for mutant in filter(None, chain.from_iterable(rounds)):
            results.append(mutant.judge())
            print(json.dumps(results[-1]), flush=True)
            if built.cache_info().currsize > 60:
                built.cache_clear()  # a program takes megabytes
            if args.json:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
