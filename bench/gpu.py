"""Runs every check and benchmark on one GPU and records them: `make gpu`, or `python -m bench.gpu`.

    STAGES="parity bench"   only these, in the order below; any can be repeated alone
                            (on 16 cores `env aot parity` and the rest take under 9 minutes each,
                            for machines that stop a command after 10)
    OUT=dir                 folder for the records; by default bench/results/local/<device>
    NANOGPT=path LLMC=path  checkouts whose training step is measured as well
    FULL=1                  no budgets: every test, case and batch size, two starts of each step
    FASTGPT_COMMIT=...      the commit, where there is no .git

The stages are env, aot, parity, bench, step and convergence. Each is a process with a time budget
of its own, which for aot and parity follows from the kernels and tests counted, and its outcome is
recorded at once, so that a later failure loses nothing. The figure of a stage says what its budget
cut off. Without CUDA nothing runs and the exit status is 2; `--rehearse` runs every stage at tiny
shapes, on a CPU with the kernels in Triton's interpreter, or under `python -m simgpu` on its GPU.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import records

ROOT = Path(__file__).parents[1]
NEEDED = ("triton", "pytest", "hypothesis", "matplotlib")
REHEARSED = "layer_norm and errors_are_seen"
"""pytest's `-k` expression for the tests that a trial run without a GPU selects."""
SIMULATED = "SIMGPU" in os.environ
"""Whether the GPU is simulated (docs/simgpu.md)."""
FORM_S = 3.0
"""Seconds of a core to compile a kernel: 0.6 on an EPYC that does nothing else, with a margin."""
TEST_S = 6.0
"""Seconds of a core for a test of CUDA that compiles its kernels first: an estimate."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """Settings of a run, given to every stage."""

    out: Path
    full: bool
    rehearse: bool

    @property
    def on(self) -> str:
        return "cpu" if self.rehearse and not SIMULATED else "cuda"

    @property
    def arch(self) -> int:
        """Compute capability as one number, for which the kernels are compiled."""
        if self.on == "cpu":
            return 90
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the run: a command with a time budget.

    Args:
        budget: computes the seconds after which the stage is stopped.
        command: builds the arguments of Python, given the seconds that the stage may take.
        kind: kind of the records that give the key figure.
        key: computes the key figure from those records; without any, it is the last line printed.
    """

    name: str
    budget: Callable[[Context], int]
    command: Callable[[Context, float], list[str]]
    kind: str = ""
    key: Callable[[list[Row]], str] = str


# --- the stages -----------------------------------------------------------------------------------


def _myself(context: Context, *task: str) -> list[str]:
    rehearse = ["--rehearse"] if context.rehearse else []
    return ["-m", "bench.gpu", *rehearse, "--out", str(context.out), *task]


def _aot(context: Context, _: float) -> list[str]:
    command = ["-m", "kernels.aot", "--arch", str(context.arch)]
    if context.rehearse:
        command += ["--only", "_norm_sum_kernel"]
    narrow = [] if context.full else ["--changed"]
    return [*command, *narrow, "--json", str(context.out / "aot.json")]


def _aot_budget(_: Context) -> int:
    """Returns the seconds to compile one form of each recorded kernel, on all cores."""
    budgets = json.loads((ROOT / "kernels/proof/budget.json").read_text("utf-8"))
    kernels = {
        key.split()[0] for archs in budgets.values() for rows in archs.values() for key in rows
    }
    return 15 + math.ceil(len(kernels) * FORM_S / (os.cpu_count() or 1))


def parity_files() -> list[str]:
    """Lists the files with tests that need CUDA, in the order in which they are run.

    Training comes first, because each of its tests compiles for long with one thread.
    """
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [p for p in paths if "pytest.mark.gpu" in p.read_text("utf-8")]
    found.sort(key=lambda path: (path.parent.name != "train", path.parent.name != "cuda"))
    return [str(path.relative_to(ROOT)) for path in found]


def _selected_tests(context: Context) -> list[str]:
    # the option is for tests that need no more than torch
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if context.rehearse:
        return [*options, "-k", REHEARSED, "tests/kernels/test_conformance.py"]
    return [*options, "-m", "gpu" if context.full else "gpu and not slow", *parity_files()]


def _workers() -> int:
    """Returns how many tests run at once: most wait for the compiler, not for the GPU."""
    return min(8, os.cpu_count() or 1) if importlib.util.find_spec("xdist") else 1


def _parity(context: Context, _: float) -> list[str]:
    command = _myself(context, "--pytest", "-v", "-rfE", "--tb=short", *_selected_tests(context))
    parallel = ["-n", str(_workers()), "--dist", "loadgroup"]
    return command if context.rehearse or _workers() == 1 else [*command, *parallel]


@functools.cache
def tests_to_run(context: Context) -> int:
    """Counts the tests of the stage parity, by collecting them; 0 if that fails."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *_selected_tests(context)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"(\d+)(?:/\d+)? tests? collected", done.stdout)
    return int(found[1]) if found else 0


def _parity_budget(context: Context) -> int:
    return 30 + math.ceil(tests_to_run(context) * TEST_S / _workers())


def _bench(context: Context, seconds: float) -> list[str]:
    command = ["-m", "bench", "--out", str(context.out), "--budget", f"{0.8 * seconds:.0f}"]
    if context.rehearse:
        return [*command, "--device", context.on, "--sizes", "tiny", "--rounds", "2"]
    return [*command, "--full"] if context.full else [*command, "--goals"]


def _step(context: Context, seconds: float) -> list[str]:
    command = ["-m", "bench.step", "--out", str(context.out), "--explain"]
    if context.rehearse:
        command += ["--device", context.on, "--tiny", "--rounds", "1", "--batch", "2"]
        return [*command, "--contenders", "fastgpt triton", "eager"]
    given = {flag: os.environ.get(flag.upper()) for flag in ("nanogpt", "llmc")}
    command += [word for flag, path in given.items() if path for word in (f"--{flag}", path)]
    if context.full:
        return [*command, "--starts", "2"]
    # not `fastgpt`, whose trial of our kernels needs the GPU to itself
    names = ["fastgpt triton", "compiled", "eager", *(["nanogpt"] if given["nanogpt"] else [])]
    command += ["--budget", f"{0.4 * seconds:.0f}", "--rounds", "2", "--parallel-start"]
    return [*command, "--contenders", *names]


def _convergence(context: Context, seconds: float) -> list[str]:
    command = ["-m", "bench.convergence", "--out", str(context.out)]
    if context.rehearse:
        return [*command, "--tiny", "--steps", "40"]
    return [*command, *(() if context.full else ("--budget", f"{0.6 * seconds:.0f}"))]


def _tests(rows: list[Row]) -> str:
    count = Counter(row["outcome"] for row in rows)
    return ", ".join(f"{count[word]} {word}" for word in ("passed", "failed", "skipped"))


def _measured(rows: list[Row]) -> str:
    """Summarises the benchmark in a few words: our number of rows, and attention's first rate."""
    ours = [row for row in rows if row["implementation"] == "ours"]
    first = next((row for row in ours if row["op"] == "attention"), None)
    rate = f"; {first['case']} {first['pass']} {first['tflops']:.3g} TFLOP/s" if first else ""
    return f"{len(ours)} of our rows{rate}"


def _steps(rows: list[Row]) -> str:
    """Summarises the training steps in a few words: fastgpt's best tokens per second."""
    rates = {r["tok_per_s"]: r for r in rows if r["implementation"].startswith("fastgpt")}
    if not rates:
        return "no step of fastgpt"
    best = rates[max(rates)]
    at = best["case"].removeprefix("step/")
    return f"{best['implementation']} {best['tok_per_s']:,.0f} tok/s at {at}"


STAGES = (
    Stage("env", lambda _: 15, lambda context, _: _myself(context, "--environment")),
    Stage("aot", _aot_budget, _aot),
    Stage("parity", _parity_budget, _parity, "test", _tests),
    Stage("bench", lambda _: 150, _bench, "op", _measured),
    Stage("step", lambda _: 180, _step, "step", _steps),
    Stage("convergence", lambda _: 60, _convergence),
)
"""Stages of `make gpu`."""


# --- records --------------------------------------------------------------------------------------


@functools.cache
def writer(context: Context) -> records.Writer:
    return records.Writer(context.on, context.out)


def rows_since(began: str, context: Context, kind: str) -> list[Row]:
    """Returns the records of a kind, of runs that began then or later."""
    try:
        rows = records.read(context.out)
    except ValueError:  # the folder has other files, too
        return []
    return [row for row in rows if row["kind"] == kind and row.get("run", "") >= began]


def environment(context: Context) -> int:
    """Records what is installed, as stage `env`; returns 1 if a needed package is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return 1
    found = {"state": records.state(context.on), "arch": context.arch, "python": sys.version}
    writer(context).write("environment", found)
    about = records.described(context.on)
    said = " ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    print(f"{about['device']}, driver {about['driver']}, {said}")
    return 0


class Outcomes:
    """A pytest plugin that records the outcome of each test as soon as it is known."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            writer(self.context).write("test", row)


# --- running them ---------------------------------------------------------------------------------


def run_stage(stage: Stage, context: Context) -> Row:
    """Runs one stage of `make gpu` within its time budget and returns its record."""
    seconds = 24 * 3600 if context.full or SIMULATED else stage.budget(context)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environ.pop("TRITON_INTERPRET", None)
    if context.on == "cpu" and stage.name != "aot":  # which compiles
        environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    began, start = time.strftime("%Y-%m-%dT%H:%M:%S"), time.perf_counter()
    command = [sys.executable, *stage.command(context, seconds)]
    with (context.out / "gpu.log").open("a+", encoding="utf-8") as file:
        print(f"\n=== {stage.name}: {' '.join(command)}", file=file, flush=True)
        before = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        took = time.perf_counter() - start
        file.seek(before)
        printed = ["no output", *(line.strip() for line in file if line.strip())]
    rows = rows_since(began, context, stage.kind)
    key = stage.key(rows) if rows else printed[-1]
    stopped = stage.kind == "test" and status is None
    key += "".join(left_out(context, began, tests_to_run(context) - len(rows) if stopped else 0))
    if status is None:
        key = f"stopped after {seconds} s; {key}"
    elif status:
        key = f"exit status {status}; {key}"
    return {
        "stage": stage.name, "passed": status == 0, "key": key[:300], "seconds": took,
        "budget": None if context.full else seconds, "command": command[1:],
    }  # fmt: skip


def left_out(context: Context, began: str, tests: int) -> Iterator[str]:
    """Yields what a budget cut off, in words; `tests` is the number of tests not run."""
    if tests > 0:
        yield f"; {tests} of {tests_to_run(context)} tests not run"
    missing = rows_since(began, context, "missing")
    if late := sum(row["reason"].startswith("over the budget") for row in missing):
        yield f"; {late} of the cases not run: over the budget"


def _end(process: subprocess.Popen) -> None:
    """Ends a process and all that it has started, which share a session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(5)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        usage="%(prog)s [--FLAG VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    environ, names = os.environ, [stage.name for stage in STAGES]
    chosen = environ.get("STAGES", "").split() or names
    parser.add_argument("--stages", nargs="+", default=chosen, metavar="NAME", help=" ".join(names))
    parser.add_argument("--out", type=Path, default=environ.get("OUT") or None, help="folder")
    full = environ.get("FULL", "") not in ("", "0")
    parser.add_argument("--full", action="store_true", default=full, help="no time budgets")
    parser.add_argument("--rehearse", action="store_true", help="run tiny shapes without a GPU")
    # the commands of the stages env and parity
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in names]:
        parser.error(f"unknown stage {unknown[0]!r} (expected some of {' '.join(names)})")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not args.rehearse and not torch.cuda.is_available():
        print("gpu: torch sees no CUDA device; --rehearse runs every stage on a CPU, tiny")
        return 2
    context = Context(Path(), args.full, args.rehearse)
    out = args.out or records.folder_of(context.on)
    out.mkdir(parents=True, exist_ok=True)
    context = replace(context, out=out.absolute())
    if args.environment:
        return environment(context)
    if args.pytest is not None:
        import pytest

        return pytest.main(args.pytest, plugins=[Outcomes(context)])
    stages = [stage for stage in STAGES if stage.name in args.stages]
    if not context.full:
        print(f"at most {sum(stage.budget(context) for stage in stages) / 60:.0f} minutes")
    print(f"{'stage':12} {'passed':7} {'seconds':>7}  key figure")
    passed = True
    for stage in stages:
        print(f"{stage.name:12} ", end="", flush=True)
        row = run_stage(stage, context)
        writer(context).write("stage", row)
        passed &= row["passed"]
        print(f"{'yes' if row['passed'] else 'NO':7} {row['seconds']:7.0f}  {row['key']}")
    print(f"records and log: {out}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
