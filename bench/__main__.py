"""Times every op and the training step beside other implementations: `python -m bench [OP ...]`.

A row is printed as it is measured. The last lines say which ops are slower than in this machine's
record in bench/results. The measurements are added to bench/results/local. The exit status is 1 if
an op of ours was not timed because its results were wrong.
"""

import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench import measure, records, report, step
from bench.ops import Case, cases
from bench.records import OVER_BUDGET, Record, record
from fastgpt import flags
from fastgpt.device import cpu, device
from fastgpt.errors import UserError, run_command
from fastgpt.kernels.runtime import INTERPRETING

CPU_STEPS = (  # training steps measured on a CPU, if they begin within this share of the budget
    (1.0, step.StepBench(recipe="shakespeare-cpu")),  # takes 30 s
    (0.75, step.StepBench(recipe="shakespeare-char", rounds=2, batch=(4,))),  # 50 to 80 s
)
SLOWER = 1.1  # time over the record's from which an op counts as slower
NO_KERNELS = "no kernel runs on a CPU: ours is what a model calls here (kernels: make op OP=...)\n"
HEADER = f"  pass implementation  {'µs p20 p50 p80':>26}  {'rate':>13}  of limit        x    error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Times every op and the training step beside PyTorch and other libraries.

    x is a peer's time divided by ours; above 1x, ours is faster. Our row shows the fastest peer's
    x. The error is relative to fp64, of all numbers of an output or gradient.
    """

    op: tuple[str, ...] = ()
    """Ops, such as layer_norm, also without --op; by default all, and training steps on a CPU."""
    size: tuple[str, ...] = ()
    """Sizes, such as gpt2-124m; `tiny` takes small shapes, for a rehearsal in the interpreter."""
    dtype: tuple[Literal["bf16", "fp16", "fp32"], ...] = ()
    """Number formats; by default bf16 on CUDA, and on a CPU fp32 and bf16 where it is fast."""
    against: tuple[str, ...] = ()
    """Implementations to measure beside ours; by default all, but `compiled` on a CPU."""
    quick: bool = False
    """Measure one case of each op and no training step: about 40 s on a CPU."""
    full: bool = False
    """Measure every case, including those that take long."""
    rounds: int | None = None
    """Number of rounds of each pass; by default as many as fit into 0.5 s (0.2 s on a CPU)."""
    budget: float | None = None
    """Begin nothing after this many seconds; by default 120 on a CPU without --full, --against."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure; `auto` takes CUDA if torch sees it, else the CPU."""
    json: bool = False
    """Print each record as a line of JSON, and nothing else."""
    out: Path | None = None
    """Folder of the record; by default bench/results/local."""
    publish: bool = False
    """Move the local records beside the committed ones, if ours are right, and write the page."""

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 2:
            raise UserError(f"--rounds is {self.rounds}: expected 2 or more")
        if self.publish and (self.out is not None or self.json or self.rough):
            raise UserError("--publish: expected no --out, --json, --quick, --rounds, --size tiny")

    @property
    def rough(self) -> bool:
        """True for a run that is not published."""
        return self.quick or bool(self.rounds) or self.size == ("tiny",)


def time_ops(
    bench: Bench, todo: list[Case], on: str, over: Callable[[float], str]
) -> Iterator[list[Record]]:
    """Yields the machine's limits, then the records of each pass of each case.

    A case is not begun if `over` returns a reason.
    """
    timer, tiny = measure.Timer(on), bench.size == ("tiny",)
    dtypes = tuple(dict.fromkeys(case.dtype for case in todo))
    rates = measure.machine_rates(timer, dtypes, 0.25 if tiny else 1.0)
    figures = {name: measure.quantiles([rate]) for name, rate in rates.items()}
    units = {name: "B/s" if name == "copy" else "FLOP/s" for name in rates}
    yield [record(f"machine/{x}", "torch", figures[x], unit=units[x]) for x in rates]
    seconds = 0.125 if bench.quick or tiny else 0.5 if on == "cuda" else 0.2
    for case in todo:
        if why := over(1.0):
            yield [record(case.name, "all", why=why)]
            continue
        try:
            yield from measure.op_records(case, timer, rates, seconds=seconds, rounds=bench.rounds)
        except Exception as error:  # keep earlier results and go on
            yield [record(case.name, "all", why=measure.in_one_line(error))]


def time_steps(over: Callable[[float], str], out: Path | None) -> None:
    """Measures, records and prints training steps on a CPU."""
    for share, asked in CPU_STEPS:
        try:
            if why := over(share):
                raise UserError(why)
            step.run(replace(asked, out=out, device="cpu"))
        except UserError as error:  # the ops' records stand
            print(f"step/{asked.recipe}: {error}")


def print_rows(rows: list[Record], once: Callable[[str], None]) -> None:
    """Prints what was measured last; `once` prints a title or a reason that it did not print."""
    case, timed = rows[0]["case"], [row for row in rows if row["figure"]]
    if case.startswith("machine/"):
        print(f"limits of the machine: {report.limits_of(rows)}\n{HEADER}")
        return
    shape = " ".join(f"{key}={value}" for key, value in rows[0].get("shape", {}).items())
    once(f"{'/'.join(case.split('/')[:3])}  {shape}")
    ours, best = (report.fastest(timed, ours=ours) for ours in (True, False))
    for row in timed:
        which = case.rpartition("/")[2] if row is timed[0] else ""
        over = best if row is ours else row
        x = f"{report.times_ours(over, ours):.2f}x" if ours and over else ""
        print(
            f"  {which:4} {row['implementation']:14}  {report.quantiles_of(row, 1e6):>26}"
            f"  {report.rate(row):>13}  {row['share']:>4.0%} {row['bound']:6} {x:>6}"
            f"  {row['error']:.1e}{' (beyond the rule)' * row['inexact']}"
        )
    for row in rows:
        if not row["figure"]:
            tell = print if row["implementation"] == "all" else once
            tell(f"       {row['implementation']} not timed: {row['why']}")
    sys.stdout.flush()


def print_verdict(rows: list[Record], on: str) -> None:
    """Prints ours beside the best peer of each case's last pass, then what became slower.

    An op is slower if its p20 exceeds the record's median by SLOWER, and by that more than eager's
    p80 does. Eager was timed in the same turns, so its own change is the machine's.
    """
    for duel in itertools.chain(*report.duels(rows).values()):
        name, ours, who, its, x = report.summary(*duel)
        print(f"{name}: ours {ours} ms" + f", best peer {who} {its} ms, {x}" * bool(who))
    here = records.described(on)["device"]
    before = [row for row in records.read() if row["device"] == here]
    old, new = (
        {(row["case"], row["implementation"]): row for row in found if row["figure"]}
        for found in (before, rows)
    )

    def change(case: str, who: str, quantile: str) -> float:
        return new[case, who]["figure"][quantile] / report.median(old[case, who])

    both, slower = old.keys() & new, 0
    compared = [x for x, who in new if who == "ours" and {(x, who), (x, "eager")} <= both]
    for case in compared:
        times, machine = change(case, "ours", "p20"), change(case, "eager", "p80")
        if times > SLOWER * max(machine, 1.0):
            slower += 1
            commit = old[case, "ours"]["commit"][:12]
            print(f"slower than at {commit}: {case} {times:.2f}x, eager {machine:.2f}x")
    print(
        f"slower than the record of {here}: {slower} of the {len(compared)} passes that both have"
    )
    for row in filter(records.failed, rows):
        print(f"ours failed {row['case']}: {row['why']}")


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        argv = ["--op", *argv]
    bench = flags.command(Bench, argv, prog="python -m bench")
    on = device.pick_device(bench.device, "--device", ("cuda", "cpu"))
    which = {"against": bench.against, "quick": bench.quick, "full": bench.full}
    todo = cases(on, bench.op, bench.size, bench.dtype, **which)
    if on == "cpu":
        cpu.keep_freed_memory()
    unlimited = on != "cpu" or bench.full or bench.against
    usual = math.inf if unlimited else 120.0
    budget, start = usual if bench.budget is None else bench.budget, time.perf_counter()

    def over(share: float) -> str:
        late = time.perf_counter() - start > share * budget
        return f"{OVER_BUDGET} of {share * budget:.0f} s" if late else ""

    writer = records.Writer(on, bench.out, rough=bench.rough)
    rows, once = list[Record](), functools.cache(print)
    print(NO_KERNELS * (on == "cpu" and not (INTERPRETING or bench.json)), end="")
    for found in filter(None, time_ops(bench, todo, on, over)):
        writer.write(*found)
        if bench.json:
            print("\n".join(json.dumps(row | writer.common) for row in found), flush=True)
        else:
            print_rows(found, once)
        rows += found
    only_ops = bench.op or bench.size or bench.dtype or bench.against or bench.quick or bench.json
    if on == "cpu" and not only_ops:
        time_steps(over, bench.out)
    if not bench.json:
        print(f"wrote {writer.path}")
        print_verdict(rows, on)
    wrong = any(map(records.failed, rows))
    if bench.publish and not wrong:
        report.publish()
    return int(wrong)


if __name__ == "__main__":
    run_command(main)
