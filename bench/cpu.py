"""Accounts for the time of training on a CPU: `python -m bench.cpu`.

It runs two recipes as whole processes and times their phases. Then, for each of four recipes, it
times a step beside those of other trainers, in bf16 where the CPU multiplies bf16 and in fp32, and
breaks each into parts. With `--publish` it writes docs/benchmarks/cpu.md from the records, for each
step from the run with the most trainers.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import records, step, tables
from bench.report import DOCS
from bench.tables import Row
from bench.timing import ROOT
from fastgpt import flags
from fastgpt.config.recipes import RECIPES
from fastgpt.device import device
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.files import data_dir

STEPS: dict[str, dict[str, Any]] = {
    "baby": {},
    "shakespeare-cpu": {"rounds": 5},
    "shakespeare-char": {"batch": (16,)},
    "gpt2-124m": {"batch": (4,), "context": 64},
}
"""Recipes whose steps are timed, with their options of `bench.step`."""
PROCESSES = ("shakespeare-cpu", "baby")
"""Recipes that are run as whole processes."""
PAGE = DOCS / "benchmarks" / "cpu.md"
PHASES: tuple[str, ...] = ("start", "training", "evaluations", "samples", "end")
HEAD = """# Where the time goes on a CPU

`python -m bench.cpu --publish` writes this page from its records; nothing on it is typed by hand.
[performance.md](../performance.md#on-a-cpu) says what was done about it, and what did not help.
"""
NOTES = """
A part's percentage is its limit over its time: the time of its products at the matmul rate that was
measured in that run, or of its bytes at the copy rate. The optimizer's limit includes Muon's
products. `other` is embedding, activation, dropout and casts, `host gap` the time of Python and of
PyTorch's dispatcher in which no op runs. Of a run's phases an evaluation includes the checkpoint
before it, and `end` the last one's writing, the plot and the end of the process.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuBreakdown:
    """Accounts for the time of training steps and whole runs on a CPU, beside other trainers."""

    nanogpt: Path | None = None
    """Path of a nanoGPT checkout."""
    nanochat: Path | None = None
    """Path of a nanochat checkout; its step is compiled, and has AdamW for its optimizer."""
    llmc: Path | None = None
    """Path of llm.c's train_gpt2, or of a checkout that has it; timed at GPT-2's sizes only."""
    compiled: bool = False
    """Also time a plain loop under torch.compile, which takes a minute for each recipe."""
    recipes: tuple[str, ...] = tuple(STEPS)
    """Recipes whose steps are timed."""
    processes: tuple[str, ...] = PROCESSES
    """Recipes to run as whole processes."""
    rounds: int = 2
    """Number of timed rounds; shakespeare-cpu has 5."""
    publish: bool = False
    """Move the local records beside the committed ones and write docs/benchmarks/cpu.md."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"--rounds is {self.rounds}: expected 1 or more")
        if unknown := [name for name in self.recipes if name not in STEPS]:
            raise UserError(f"--recipes {unknown[0]}: expected some of {', '.join(STEPS)}")
        if unknown := [name for name in self.processes if name not in RECIPES]:
            raise unknown_name("recipe", unknown[0], RECIPES)


def step_bench(breakdown: CpuBreakdown, recipe: str) -> step.StepBench:
    """Returns the benchmark of one recipe's step, beside the peers that were given."""
    narrow = device.pick_precision("auto", "cpu") != "fp32"
    names = ["fastgpt", *["fastgpt fp32"] * narrow, "eager", *["compiled"] * breakdown.compiled]
    names += ["nanogpt", *["nanogpt fp32"] * narrow] if breakdown.nanogpt else []
    names += ["nanochat"] if breakdown.nanochat else []
    asked = step.StepBench(
        recipe=recipe, rounds=breakdown.rounds, device="cpu", implementations=tuple(names),
        nanogpt=breakdown.nanogpt, nanochat=breakdown.nanochat,
        llmc=breakdown.llmc if recipe == "gpt2-124m" else None,
    )  # fmt: skip
    return replace(asked, **STEPS[recipe])


def phases(lines: Iterable[tuple[float, str]], end: float) -> dict[str, float]:
    """Sums the seconds of a run's phases from the times at which its lines were printed.

    Args:
        lines: (seconds since the start, line); each line ends the phase that it reports.
        end: seconds from the start to the end of the process.
    """
    spent, before, began = dict.fromkeys(PHASES, 0.0), 0.0, False
    for at, line in lines:
        if line.startswith("step") and "val loss" in line:
            phase = "evaluations"
        elif line.startswith("step"):
            phase = "training"
        elif line.startswith("--- sample"):
            phase = "samples"
        else:
            phase = "end" if began else "start"
        began |= line.startswith("step")
        spent[phase] += at - before
        before = at
    spent["end"] += end - before
    return spent


def run_process(recipe: str) -> dict[str, Any]:
    """Runs a recipe as `python train.py`; returns its seconds in all and by phase."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "train.py", recipe, "--run-dir", f"{folder}/run"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "FASTGPT_DATA": str(data_dir().absolute())},
        )  # fmt: skip
        assert process.stdout is not None
        lines = [(time.perf_counter() - start, line) for line in process.stdout]
        if process.wait():
            raise UserError(f"train.py {recipe} ended with exit status {process.returncode}")
        seconds = time.perf_counter() - start
    return {
        "case": f"process/{recipe}", "seconds": seconds, "phases": phases(lines, seconds),
        "header": [line.strip() for _, line in lines[:2]],
    }  # fmt: skip


def process_cells(row: Row) -> tuple[str, ...]:
    spent = (f"{row['phases'][phase]:.1f}" for phase in PHASES)
    return row["case"].split("/", 1)[1], f"{row['seconds']:.1f}", *spent


PROCESS = f"recipe|seconds|{'|'.join(PHASES)}"


def page(rows: list[Row]) -> str:
    """Lays out the steps and the newest whole processes of each CPU that has records of both."""
    said = HEAD + NOTES
    for group in tables.grouped([row for row in rows if row["on"] == "cpu"], "device"):
        steps = beside_most([row for row in group if row["kind"] == "step"])
        runs = {row["case"]: row for row in group if row["kind"] == "process"}
        if not (steps and runs):
            continue
        said += f"\n## {group[0]['device']}\n\n### Steps\n\n{tables.step_table(steps, [])}"
        said += f"\n### Milliseconds by part\n\n{tables.parts_table(steps)}"
        lines = ((*process_cells(row), tables.link(row)) for row in runs.values())
        said += f"\n### Whole processes, seconds\n\n{tables.table(f'{PROCESS}|', lines)}"
    return said


def beside_most(steps: list[Row]) -> list[Row]:
    """Returns the rows of each case of the run with the most implementations, the newest first."""
    found: list[Row] = []
    for rows in tables.grouped(steps, "case"):
        found += max(tables.grouped(rows, "run"), key=lambda group: (len(group), group[0]["run"]))
    return found


def text() -> str:
    """Returns the page of the committed records."""
    rows = records.read()
    for row in rows:
        row["link"] = os.path.relpath(row["path"], PAGE.parent)
    return page(rows)


def main(argv: list[str]) -> None:
    breakdown = flags.parse(CpuBreakdown, argv, prog="python -m bench.cpu")
    rows = [run_process(recipe) for recipe in breakdown.processes]
    records.show(PROCESS, map(process_cells, rows))
    print(records.Writer("cpu").write("process", *rows))
    for recipe in breakdown.recipes:
        step.run(step_bench(breakdown, recipe))
    if breakdown.publish:
        records.publish()
        PAGE.write_text(text(), encoding="utf-8")
        print(PAGE)


if __name__ == "__main__":
    run_command(main)
