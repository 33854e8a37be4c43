"""Benchmarks every op and the training step beside other implementations: `python -m bench`.

Writes a record into `bench/results/local/` and a page of all records there, `benchmarks.md`.
`bench.step` measures the training step and has more options. The exit status is 1 if an op of ours
was not timed because its results were wrong.
"""

import time
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bench import goals, measure, peers, records, report, step, tables
from bench.cases import Case, cases
from bench.timing import Timer, machine_rates, peaks_of
from fastgpt import flags
from fastgpt.device import cpu, device
from fastgpt.errors import UserError, run_command

SECONDS = {"cuda": 0.5, "cpu": 0.2}
"""Time in seconds to spend on one pass (forward, backward or both) of a case, by device."""
CPU_BUDGET = 120.0
"""Default of `--budget` on a CPU; the last step that is begun takes under a minute."""
CPU_STEPS: dict[str, dict[str, Any]] = {
    "shakespeare-cpu": {"rounds": 5},
    "shakespeare-char": {"rounds": 2, "batch": (4,)},  # its own 64 would take minutes
}
"""Recipes whose training step is measured on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Times every op and the training step beside PyTorch and other libraries."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Ops, such as relu2, or patterns as of --only."""
    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Measure only cases whose names match a pattern: 'attention/*', '*/gpt2-124m/bf16', 'step/*'.

    Give --only once for each pattern.
    """
    list: bool = False
    """Print the cases and their implementations, without measuring them."""
    quick: bool = False
    """Measure one shape of each op, in less time: about 1.5 minutes on a CPU."""
    full: bool = False
    """Measure every case, including those that take long."""
    goals: bool = False
    """Measure only the cases that have a goal in bench/goals.toml."""
    compiled: bool = False
    """On a CPU, also measure torch.compile of the references (10 to 20 s for each case)."""
    rounds: int | None = None
    """Number of rounds of each pass; by default as many as fit into 0.5 s (0.2 s on a CPU)."""
    budget: float | None = None
    """Seconds after which nothing further is started; what is skipped is recorded as missing.

    By default 120 on a CPU, without --full, --compiled and --goals."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure; `auto` takes CUDA if torch sees it, else the CPU."""
    sizes: Literal["usual", "tiny"] = "usual"
    """Sizes of the cases; `tiny` takes small shapes, for a rehearsal in Triton's interpreter."""
    out: Path | None = None
    """Folder of the record, without a page; by default bench/results/local/<device>."""
    publish: bool = False
    """Move the local records beside the committed ones and write docs/benchmarks.md.

    Nothing is moved if an op of ours gave wrong results.
    """
    nanogpt: Path | None = None
    """Path of a nanoGPT checkout, to measure its training step as well."""

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 2:
            raise UserError(f"--rounds is {self.rounds}: expected 2 or more")
        named = tuple(name if "/" in name else f"{name}/*" for name in self.names)
        object.__setattr__(self, "only", self.only + named)
        if self.publish and self.out is not None:
            raise UserError("--publish and --out are both given: expected one of them")


def chosen(bench: Bench, on: str) -> list[Case]:
    patterns = tuple(p for p in bench.only if not p.startswith("step/"))
    if bench.only and not patterns:
        return []
    names = {goal.case for goal in goals.read()} if bench.goals else None
    which = {"quick": bench.quick, "full": bench.full, "tiny": bench.sizes == "tiny"}
    return [*cases(on, only=patterns, names=names, **which)]


def chosen_steps(bench: Bench, on: str) -> list[str]:
    """Returns the names of the recipes whose training step is measured besides the ops."""
    if on != "cpu" or bench.sizes == "tiny":
        return []
    patterns = bench.only or ("*",)
    return [name for name in CPU_STEPS if any(fnmatch(f"step/{name}", p) for p in patterns)]


def print_list(todo: list[Case], on: str) -> None:
    lines = []
    for case in todo:
        names = []
        for name, maker in case.implementations.items():
            try:
                maker(on)
                names.append(name)
            except peers.MissingError:
                names.append(f"({name})")
        shape = " ".join(f"{key}={value}" for key, value in case.shape.items())
        lines.append((case.name, shape, " ".join(names)))
    records.show("case|shape|implementations (missing ones in brackets)", lines)


def run_cases(
    bench: Bench, todo: list[Case], timer: Timer, writer: records.Writer, end: float, over: str
) -> list[measure.Record]:
    """Measures and records the cases; returns all their rows.

    Args:
        end: time of the clock from which on no case is started.
        over: reason that is recorded then.
    """
    dtypes = tuple(dict.fromkeys(case.dtype for case in todo))
    rates = machine_rates(timer, dtypes, 0.25 if bench.sizes == "tiny" else 1.0)
    writer.write("machine", {"rates": rates})
    seconds = 0.125 if bench.quick or bench.sizes == "tiny" else SECONDS[timer.on]
    rows: list[measure.Record] = []
    before = records.state(timer.on)
    for number, case in enumerate(todo, start=1):
        start = time.perf_counter()
        about = {"case": case.name, "op": case.spec.name, "implementation": "all"}
        if time.perf_counter() > end:
            writer.write("missing", {**about, "reason": over})
            print(f"{number}/{len(todo)} {case.name}: {over}", flush=True)
            continue
        peaks = peaks_of(rates, case.dtype)
        try:
            found = [*measure.records_of(case, timer, peaks, seconds=seconds, rounds=bench.rounds)]
        except Exception as error:  # keep earlier results and go on
            found = [("refused", {**about, "reason": measure.in_one_line(error)})]
        after = records.state(timer.on)
        for kind, row in found:
            writer.write(kind, {**row, "before": before, "after": after})
        rows += found
        before = after
        took = time.perf_counter() - start
        print(f"{number}/{len(todo)} {case.name}: measured in {took:.1f} s", flush=True)
    return rows


def outcome(found: list[measure.Record]) -> str:
    """Describes in a few words how long the last pass of a case took, ours and the best peer's."""
    timed = [row for kind, row in found if kind == "op"]
    last = {row["implementation"]: row["device_s"]["p50"] for row in timed}  # of the last pass
    if "ours" not in last:
        return next((row["reason"] for kind, row in found if kind == "refused"), "not timed")
    ms = f"{timed[-1]['pass']}: ours {last['ours'] * 1e3:.3g} ms"
    others = {name: seconds for name, seconds in last.items() if name != "ours"}
    if not others:
        return ms
    best = min(others, key=others.__getitem__)
    its = others[best]
    return f"{ms}, best peer {best} {its * 1e3:.3g} ms, {its / last['ours']:.2f}x"


def print_rows(rows: list[measure.Record]) -> None:
    """Prints the times as a table, followed by the implementations that were refused."""
    lines, before = [], None
    for row in (row for kind, row in rows if kind == "op"):
        lines += [()] * (before not in (None, row["case"]))
        before = row["case"]
        times = " ".join(f"{row['device_s'][p] * 1e3:.3g}" for p in ("p20", "p50", "p80"))
        cells = (row["case"], row["pass"], row["implementation"], times)
        lines.append((*cells, tables.rate(row), f"{row['share']:.0%}"))
    records.show("case|pass|implementation|ms p20 p50 p80|rate|of limit", lines)
    for row in (row for kind, row in rows if kind == "refused"):
        print(f"{row['case']} {row['implementation']}: not timed: {row['reason']}")


def main(argv: list[str]) -> int:
    bench = flags.parse(Bench, argv, prog="python -m bench")
    on = device.pick_device(bench.device, "--device", ("cuda", "cpu"))
    peers.COMPILE_ON_CPU = bench.compiled
    todo, steps = chosen(bench, on), chosen_steps(bench, on)
    if not todo and not steps:
        raise UserError(
            f"{' '.join(bench.only)}: expected"
            f" {' or '.join(f'step/{name}' for name in CPU_STEPS)} (only on a CPU);"
            " for other steps use python -m bench.step"
        )
    if bench.list:
        print_list(todo, on)
        return 0
    timer = Timer(on)
    if on == "cpu":
        cpu.keep_freed_memory()
    settings = {**timer.settings, "quick": bench.quick, "rounds": bench.rounds}
    writer = records.Writer(on, bench.out, **settings)
    unlimited = bench.full or bench.compiled or bench.goals
    usual = CPU_BUDGET if on == "cpu" and not unlimited else float("inf")
    budget = usual if bench.budget is None else bench.budget
    end, over = time.perf_counter() + budget, f"over the budget of {budget:.0f} s"
    rows = run_cases(bench, todo, timer, writer, end, over) if todo else []
    if rows:
        print_rows(rows)
    for recipe in steps:
        if time.perf_counter() > end:
            about = {"case": f"step/{recipe}", "implementation": "all"}
            writer.write("missing", {**about, "reason": over})
            print(f"step/{recipe}: {over}", flush=True)
            continue
        asked = step.StepBench(recipe=recipe, nanogpt=bench.nanogpt, out=bench.out)
        step.run(replace(asked, **CPU_STEPS[recipe]))
    for case in todo if rows else ():
        print(f"{case.name} {outcome([r for r in rows if r[1]['case'] == case.name])}")
    print(writer.path)
    wrong = any(kind == "refused" and row["implementation"] in report.OURS for kind, row in rows)
    if bench.out is None:
        print(report.publish() if bench.publish and not wrong else report.write_local())
    return int(wrong)


if __name__ == "__main__":
    run_command(main)
