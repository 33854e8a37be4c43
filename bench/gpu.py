"""From nothing to a full record of one GPU: `make gpu`, or `python -m bench.gpu`.

    STAGES="parity bench"   only these, in the order below; any can be repeated alone
    OUT=dir                 where the records go, flat; by default bench/results/<device>
    NANOGPT=path LLMC=path  checkouts to race the training step against
    FULL=1                  no budgets: every test, every case, every batch size, twice started
    FASTGPT_COMMIT=...      the commit, where there is no .git

env, aot, parity, bench, step, convergence: each is a process with a time budget of its own, and its
outcome is recorded as soon as it is known, whatever becomes of the next. Without CUDA the exit
status is 2 and nothing is run; `--rehearse` runs every stage on a CPU, at tiny shapes, kernels in
Triton's interpreter.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("torch", "triton", "pytest", "hypothesis", "numpy", "rich", "tyro", "matplotlib")
PARITY = ("attention", "layer_norm", "cross_entropy")
"""Ops whose tests on CUDA come first; all others follow."""
REHEARSED = "layer_norm"
"""The op whose tests stand for all in a rehearsal."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the stages are told."""

    out: Path
    full: bool
    rehearse: bool

    @property
    def arch(self) -> int:
        """Compute capability as one number: what the kernels are compiled for."""
        if self.rehearse:
            return 90
        import torch

        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Args:
        name: as in STAGES.
        budget: seconds after which it is stopped.
        command: its arguments of Python; given its own seconds to spend, where it can heed them.
        key: the figure of the table, from what it printed.
    """

    name: str
    budget: int
    command: Callable[[Context, float], list[str]]
    key: Callable[[str], str]


# --- the stages -----------------------------------------------------------------------------------


def _env(context: Context, _: float) -> list[str]:
    rehearse = ["--rehearse"] if context.rehearse else []
    return ["-m", "bench.gpu", "--environment", *rehearse, "--out", str(context.out)]


def _aot(context: Context, _: float) -> list[str]:
    command = ["-m", "kernels.aot", "--arch", str(context.arch)]
    if context.rehearse:
        command += ["--only", "_norm_sum_kernel"]
    narrow = [] if context.full else ["--changed"]
    return [*command, *narrow, "--json", str(context.out / "aot.json")]


def parity_files() -> list[str]:
    """The files with tests that need CUDA, those of PARITY first."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    found = [f"tests/{p.name}" for p in paths if "pytest.mark.gpu" in p.read_text("utf-8")]
    first = [f"tests/test_{name}_cuda.py" for name in PARITY]
    return [*(name for name in first if name in found), *(n for n in found if n not in first)]


def _parity(context: Context, _: float) -> list[str]:
    # -v: a line a test, so that a run that is cut short still says how far it came
    command = ["-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors"]  # where only fastgpt's dependencies are missing
    if context.rehearse:
        paths = (ROOT / "tests").glob(f"test_{REHEARSED}*.py")
        files = sorted(str(path) for path in paths if "cuda" not in path.name)
        return [*command, "-k", "one_percent", *files]
    if importlib.util.find_spec("xdist"):  # most of them wait for the compiler, not for the GPU
        command += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadgroup"]
    marked = "gpu" if context.full else "gpu and not slow"
    return [*command, "-m", marked, *parity_files()]


def _bench(context: Context, seconds: float) -> list[str]:
    command = ["-m", "bench", "--out", str(context.out), "--budget", f"{0.8 * seconds:.0f}"]
    if context.rehearse:
        return [*command, "--device", "cpu", "--sizes", "tiny", "--rounds", "2"]
    return [*command, "--full"] if context.full else [*command, "--goals"]


def _step(context: Context, seconds: float) -> list[str]:
    command = ["-m", "bench.step", "--out", str(context.out), "--explain"]
    if context.rehearse:
        names = ["fastgpt triton", "eager"]
        tiny = ["--device", "cpu", "--tiny", "--rounds", "1", "--batch", "2"]
        return [*command, *tiny, "--contenders", *names]
    given = {flag: os.environ.get(flag.upper()) for flag in ("nanogpt", "llmc")}
    command += [word for flag, path in given.items() if path for word in (f"--{flag}", path)]
    if context.full:
        return [*command, "--starts", "2"]
    # not `fastgpt`, whose trial of our kernels must have the GPU for itself
    names = ["fastgpt triton", "compiled", "eager", *(["nanogpt"] if given["nanogpt"] else [])]
    command += ["--budget", f"{0.4 * seconds:.0f}", "--rounds", "2", "--parallel-start"]
    return [*command, "--contenders", *names]


def _convergence(context: Context, seconds: float) -> list[str]:
    command = ["-m", "bench.convergence", "--out", str(context.out)]
    if context.rehearse:
        return [*command, "--tiny", "--steps", "40"]
    return [*command, *(() if context.full else ("--budget", f"{0.6 * seconds:.0f}"))]


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _tests(output: str) -> str:
    """Of pytest -v: how many passed, failed and were skipped, of a run cut short, too."""

    def count(word: str) -> int:
        # the outcome stands behind the name, or before it where a worker of xdist had the test
        return len(re.findall(rf"^(?:\S+::.* |\[gw\d+\] \[ *\d+%\] ){word}", output, re.MULTILINE))

    return f"{count('PASSED')} passed, {count('FAILED')} failed, {count('SKIPPED')} skipped"


def _measured(output: str) -> str:
    """How many rows of ours the table of `bench` has, and attention's first rate."""
    found = re.findall(r"(attention/\S+).*?(fwd).*?ours.*?([\d.e+-]+ TFLOP/s)", output)
    first = f"; {found[0][0]} {found[0][1]} {found[0][2]}" if found else ""
    return f"{len(re.findall(r'[│|] ours ', output))} rows of ours{first}"


def _steps(output: str) -> str:
    rates = re.findall(r"step/(\S+) (fastgpt[ \w]*): ([\d,]+) tok/s", output)
    best = max(rates, key=lambda rate: int(rate[2].replace(",", "")), default=None)
    return f"{best[1]} {best[2]} tok/s at {best[0]}" if best else _last_line(output)


STAGES = (
    Stage("env", 15, _env, _last_line),
    Stage("aot", 25, _aot, _last_line),
    Stage("parity", 150, _parity, _tests),
    Stage("bench", 150, _bench, _measured),
    Stage("step", 180, _step, _steps),
    Stage("convergence", 60, _convergence, _last_line),
)
"""Their budgets add up to 580 s."""


def environment(context: Context) -> int:
    """The stage `env`: what is installed here, as a record; 1 if something needed is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return 1
    from bench import records

    on = "cpu" if context.rehearse else "cuda"
    facts = {"state": records.state(on), "arch": context.arch, "python": sys.version}
    writer = records.Writer(on, context.out)
    writer.write("environment", facts)
    versions = writer.common["versions"]
    said = " ".join(f"{name} {version}" for name, version in versions.items() if version)
    print(f"{writer.common['device']}, driver {writer.common['driver']}, {said}")
    return 0


# --- running them ---------------------------------------------------------------------------------


def run_stage(stage: Stage, context: Context, log: Path) -> dict:
    """Runs it under its budget and returns its row; what it printed is appended to the log."""
    budget = float("inf") if context.full else float(stage.budget)
    seconds = min(budget, 24 * 3600.0)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environ.pop("TRITON_INTERPRET", None)
    if context.rehearse and stage.name != "aot":  # which compiles, and so cannot interpret
        environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    start = time.perf_counter()
    command = [sys.executable, *stage.command(context, seconds)]
    with log.open("a+", encoding="utf-8") as file:
        print(f"\n=== {stage.name}: {' '.join(command)}", file=file, flush=True)
        began = file.tell()
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
        file.seek(began)
        output = file.read()
    key = stage.key(output) if output.strip() else "it said nothing"
    if status is None:
        key = f"stopped after {budget:.0f} s; {key}"
    elif status:
        key = f"exit status {status}; {key}"
    return {
        "stage": stage.name,
        "passed": status == 0,
        "key": key[:300],
        "seconds": time.perf_counter() - start,
        "budget": None if context.full else stage.budget,
        "command": command[1:],
    }


def _end(process: subprocess.Popen) -> None:
    """Ends it and whatever it has started: they are a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(5)


def save(rows: list[dict], context: Context) -> None:
    """Appends them to the record, with plain means where the project's own cannot be imported."""
    try:
        from bench import records

        on = "cpu" if context.rehearse else "cuda"
        records.Writer(on, context.out).write("stage", *rows)
    except ImportError as error:
        with (context.out / "stages.jsonl").open("a") as file:
            for row in rows:
                commit = os.environ.get("FASTGPT_COMMIT")
                line = {"kind": "stage", "commit": commit, "import_error": str(error), **row}
                file.write(json.dumps(line) + "\n")


def print_table(rows: list[dict]) -> None:
    """Stage, passed, seconds, key figure."""
    width = max(shutil.get_terminal_size().columns, 60)
    print(f"\n{'stage':12} {'passed':7} {'seconds':>7}  key figure")
    for row in rows:
        passed = "yes" if row["passed"] else "NO"
        line = f"{row['stage']:12} {passed:7} {row['seconds']:7.0f}  {row['key']}"
        print(line[:width] if sys.stdout.isatty() else line)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [stage.name for stage in STAGES]
    environ = os.environ
    chosen = environ.get("STAGES", "").split() or names
    parser.add_argument("--stages", nargs="+", default=chosen, metavar="NAME", help=" ".join(names))
    parser.add_argument("--out", type=Path, default=environ.get("OUT") or None)
    full = environ.get("FULL", "") not in ("", "0")
    parser.add_argument("--full", action="store_true", default=full, help="no budgets")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny, interpreted")
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in names]:
        parser.error(f"unknown stage {unknown[0]!r} (expected some of {' '.join(names)})")
    return args


def has_cuda() -> bool:
    """Whether torch sees a GPU; without torch there is none."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def default_out() -> Path:
    try:
        from bench import records
    except ImportError:  # what is missing is said by the stage `env`
        return ROOT / "bench" / "results" / "gpu"
    return records.folder_of("cuda")


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not args.rehearse and not has_cuda():
        print("gpu: torch sees no CUDA device here; --rehearse runs every stage on a CPU, tiny")
        return 2
    out = args.out or default_out()
    out.mkdir(parents=True, exist_ok=True)
    context = Context(out.absolute(), args.full, args.rehearse)
    if args.environment:
        return environment(context)
    log, rows = context.out / "gpu.log", []
    for stage in STAGES:
        if stage.name in args.stages:
            print(f"{stage.name} ...", flush=True)
            rows.append(run_stage(stage, context, log))
            save(rows[-1:], context)
            print(f"{stage.name}: {rows[-1]['seconds']:.0f} s, {rows[-1]['key']}", flush=True)
    print_table(rows)
    print(f"records and log: {out}")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
