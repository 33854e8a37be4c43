"""Runs every check and benchmark that needs a GPU: `make gpu`, or `python3 -m bench.gpu first`.

    first      a training step beside its peers; then tests and short trainings, which share the
               GPU; then ops beside theirs, and attention's tiles: 8 minutes on an H100
    second     a step with a larger batch, the other dtypes, a thousand repeats: 3 minutes
    NAME ...   stages by name, one after the other

A stage is a process group with a time budget. If it fails, hangs or breaks its CUDA context, the
others go on. What is timed runs alone. Each line goes to log.txt at once, each record to *.jsonl,
and a digest of the records ends the output. docs/gpus.md has the rest.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fastgpt.commands import installed

BEGAN, STARTED = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S")
ROOT = Path(__file__).parents[1]
CARRIED = ROOT / ".gpu"
"""Folder with wheels, tinyshakespeare.txt, nanogpt and COMMIT, for a machine without network."""
SCRATCH = ROOT / "build" / "gpu"
Statuses = dict[str, int | None]


@dataclass(frozen=True, slots=True)
class Stage:
    """Arguments of Python with a budget in seconds, which is for an H100 and 16 cores.

    Args:
        tiny: what a rehearsal appends; a command that begins with -m it runs instead.
        warm: what the stage `~NAME` appends, which fills caches and whose records are thrown away.
        nice: how far the stages that are worth more go first.
        leaves: seconds that it does not take from the stages behind it.
    """

    seconds: int
    command: str
    tiny: str = ""
    warm: str = ""
    nice: int = 0
    leaves: int = 0


STEP = (
    "-m bench.step --out {out} --parallel-start --explain --trace --rounds 6 {nanogpt}"
    " --batch %d --implementations {peer} 'fastgpt triton'"
)
TESTS = "-m bench.gpu _tests {out} -rfE --tb=short -m 'gpu and not slow' --dist loadgroup -n 8"
LATER = "fp16 or fp32 or thousand or large"
MODEL = "tests/train/test_cuda.py tests/data/test_loader.py"
TRITON = " --ops.attention triton --ops.loss chunked --ops.kernels triton --track none"
SMALL = (
    " --steps 6 --model.num-layers 1 --model.dim 32 --model.num-heads 2 --model.context 16"
    " --train.batch-tokens 64 --data.eval-tokens 64 --data.final-eval-tokens 64"
)
FEW = " -n 2 -k 'layer_norm and gpt2-124m and not thousand and %s'"


def _bench(seconds: int, *cases: str) -> Stage:
    only = "".join(f" --only {case}" for case in cases)
    tiny = f" --only '{cases[0].split('/')[0]}/*' --sizes tiny --rounds 2"
    command = "-m bench --device cuda --out {out}" + only
    return Stage(seconds, command, tiny, warm=" --rounds 2", nice=10)


STAGES = {
    "env": Stage(60, "-m bench.gpu _env {out}"),
    "step": Stage(190, STEP % 16 + " 'fastgpt triton, fp32 residual' compiled",
                  " --tiny --rounds 1 --batch 2", leaves=150),
    "step-eager": Stage(70, STEP % 16 + " --compile off", " --tiny --rounds 1 --batch 2"),
    "parity": Stage(190, f"{TESTS} -k 'not ({LATER})' tests/kernels/cuda", FEW % "bf16", leaves=95),
    "model": Stage(190, f"{TESTS} -n 4 -k 'not ({LATER})' {MODEL}",
                   " -n 0 -k waits_for_nothing", nice=5),
    "lecture": Stage(230, "-m bench.reproduce --only \"G'\" --runs {scratch}/runs --out {out}",
                     "-m bench.gpu _train {out} lecture-gpt-full" + SMALL, leaves=95),
    "char": Stage(200, "-m bench.gpu _train {out} shakespeare-char" + TRITON, SMALL, nice=5),
    "resume": Stage(150, "-m bench.gpu _resume {out} shakespeare-char --steps 30 --eval-every 0"
                    " --log-every 1 --save-every 3 --train.keep-checkpoints 9"
                    " --train.sample-tokens 0 --data.eval-tokens 16384" + TRITON, SMALL, nice=5),
    "convergence": Stage(150, "-m bench.convergence --out {out} --budget 90",
                         " --tiny --steps 40", nice=5),
    "bench-attention": _bench(80, "attention/gpt2-124m/bf16", "attention_packed/gpt2-124m/bf16"),
    "bench-norm": _bench(50, "layer_norm/gpt2-124m/bf16", "add_layer_norm/gpt2-124m/bf16",
                         "layer_norm/n768/bf16"),
    "bench-loss": _bench(70, "cross_entropy/gpt2/bf16", "linear_cross_entropy/gpt2-124m/bf16",
                         "bias_act/gpt2-124m/bf16"),
    "tune": Stage(80, "-m bench.tune --out {out} --only 'bits D=64 plain' --top 4 --budget 12",
                  " --static --arch 90 --only 'sm_90 dq 16 bits D=64 plain'",
                  warm=" --budget 1", nice=15),
    "step64": Stage(150, STEP % 64 + " compiled", " --tiny --rounds 1 --batch 4", leaves=30),
    "rest": Stage(150, f"{TESTS} -k '{LATER}' tests/kernels/cuda {MODEL}", FEW % "fp32"),
}  # fmt: skip
PLANS = {
    "first": (490, (
        ["env"], ["step"], ["step-eager"],  # the last one only if ours took no step
        ["parity", "lecture", "model", "resume", "convergence", "char",
         "~bench-attention", "~bench-norm", "~bench-loss", "~tune"],
        ["bench-attention"], ["bench-norm"], ["bench-loss"], ["tune"],
    )),
    "second": (170, (["env"], ["step64"], ["rest"])),
}  # fmt: skip
"""Seconds in all, and groups of stages, most valuable first. A group's stages run together."""


def record(out: Path, kind: str, row: dict[str, Any]) -> None:
    from torch import cuda

    from bench import records

    records.Writer("cuda" if cuda.is_available() else "cpu", out).write(kind, row)


def env(out: Path) -> int:
    """Records and prints what is installed; returns 1 if a package is missing, 2 without CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = *project["dependencies"], "pytest", "pytest-xdist", "hypothesis"
    names = [re.split("[>=;]", requirement)[0] for requirement in needed]
    if missing := [name for name in names if installed(name) is None]:
        print(f"not installed: {', '.join(missing)}")
        return 1
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device; `python -m simgpu -m bench.gpu --rehearse` needs none")
        return 2
    from bench import records

    subprocess.run("nvidia-smi; nproc; free -g; df -h .; gcc --version; nvcc --version", shell=True)
    record(out, "environment", {"state": records.state("cuda"), "python": sys.version})
    about = records.described("cuda")
    print(about["device"], about["driver"], about["versions"])
    return 0


def tests(out: Path, *arguments: str) -> int:
    """Runs pytest and records the outcome of each test as soon as it is known."""
    import pytest

    class Outcomes:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                row = {"test": report.nodeid, "outcome": report.outcome}
                record(out, "test", {**row, "seconds": report.duration})

    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", *arguments]
    return pytest.main(options, plugins=[Outcomes()])


def train(out: Path, *flags: str) -> int:
    """Trains, then records the losses that the run has logged."""
    folder = SCRATCH / "runs" / flags[0]
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([sys.executable, "train.py", *flags, "--run-dir", str(folder)])
    rows = read(folder / "metrics.jsonl")
    losses = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    best = min(losses.values(), default=None)
    record(out, "training", {"recipe": flags[0], "val_loss": losses, "best": best})
    return done.returncode


def resume(out: Path, *flags: str) -> int:
    """Trains twice under torchrun and resumes one run; records what is the same to the bit."""
    from safetensors.torch import load_file

    runs = SCRATCH / "resume"
    shutil.rmtree(runs, ignore_errors=True)

    def start(run: str, port: int, *flags: str) -> subprocess.Popen[bytes]:
        words = f"-m torch.distributed.run --nproc_per_node=1 --master-port={port} train.py"
        return subprocess.Popen([sys.executable, *words.split(), *flags, "--run-dir", runs / run])

    def found(run: str) -> tuple[dict[int, float], dict[str, Any]]:
        rows = [row for row in read(runs / run / "metrics.jsonl") if "train_loss" in row]
        last = max((runs / run / "checkpoints").glob("step_*"))
        return {r["step"]: r["train_loss"] for r in rows}, load_file(last / "model.safetensors")

    both = [start(run, 29501 + n, *flags) for n, run in enumerate("ab")]
    ended = [process.wait() for process in both]
    ended.append(start("c", 29511, "--resume", f"{runs}/a/checkpoints/step_00000003").wait())
    for run in "bc" if not any(ended) else ():
        (a, x), (b, y) = found("a"), found(run)
        differ = {step: abs(a[step] / b[step] - 1) for step in b if a[step] != b[step]}
        tensors = [name for name in x if not x[name].equal(y[name])]
        row = {"runs": f"a {run}", "steps_compared": len(b), "losses_differ": differ}
        record(out, "resume", {**row, "tensors_differ": tensors})
        print(f"a and {run}, {len(b)} steps:", differ or tensors or "the same bits")
    return max(map(abs, ended))


PROGRAMS = {"_env": env, "_tests": tests, "_train": train, "_resume": resume}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields records; a line that a killed process left unfinished does not count."""
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def digest(out: Path) -> Iterator[str]:
    """Yields the figures that the stages have recorded since this process began."""
    rows, times = defaultdict(list), defaultdict(list)
    for row in (row for path in sorted(out.glob("*.jsonl")) for row in read(path)):
        if row.get("run", "") >= STARTED:
            rows[row["kind"]].append(row)
    for row in rows["step"]:
        who, ms = f"{row['case']} {row['implementation']}", row["seconds"]["p50"] * 1e3
        parts = {part: round(value, 2) for part, value in row.get("parts", {}).items()}
        speed = f"{row['tok_per_s']:,.0f} tok/s, MFU {row['mfu']:.1%}, {ms:.2f} ms"
        memory = f"{(row['peak_bytes'] or 0) / 1e9:.1f} GB"
        yield f"{who}: {speed}, {memory}, first step {row['first_step_s']:.0f} s; {parts}"
        for kernel, spent, launches in row.get("kernels", [])[: 8 if "fastgpt" not in who else 40]:
            yield f"{spent:9.3f} ms {launches:6.1f} x  {kernel[:80]}"
    for row in (*rows["missing"], *rows["refused"]):
        yield f"not timed: {row['case']} {row['implementation']}: {row['reason'][:150]}"
    outcomes = {row["test"]: row["outcome"] for row in rows["test"]}
    yield f"tests: {dict(Counter(outcomes.values()))}"
    yield from [f"FAILED {test[-150:]}" for test in outcomes if outcomes[test] == "failed"][:25]
    for row in rows["op"]:
        ms = f"{row['implementation']} {row['device_s']['p50'] * 1e3:.3f}"
        times[f"{row['case']} {row['pass']} ms"].append(ms)
    yield from (f"{case}: {', '.join(found)}" for case, found in times.items())
    for row in rows["tune"]:
        tile = " ".join(str(row[key]) for key in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))
        yield f"tune {row['kernel']} {tile}: {row['milliseconds']['p50']:.4f} ms"
    shown = ("passed", "last", "system", "measured", "recipe", "best", "runs", "steps_compared",
             "losses_differ", "tensors_differ")  # fmt: skip
    for kind in ("convergence", "reproduction", "training", "resume"):
        for row in rows[kind]:
            yield f"{kind}: {', '.join(f'{key} {row[key]}' for key in shown if key in row)}"[:300]


class Running(threading.Thread):
    """A stage that runs; each line that it prints goes to the log at once."""

    def __init__(self, name: str, command: list[str], seconds: float, nice: int, log: TextIO):
        super().__init__(daemon=True)
        self.name, self.seconds, self.log = name, seconds, log
        self.key, self.took, self.began = "no output", 0.0, time.monotonic()
        log.write(f"{name}| $ python {shlex.join(command)}\n")
        self.process = subprocess.Popen(
            ["nice", "-n", str(nice), sys.executable, *command], cwd=ROOT, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            process_group=0,
        )  # fmt: skip
        self.start()

    def run(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.log.write(f"{self.name}| {line.rstrip()}\n")
                self.key = line.strip() or self.key
        self.took = time.monotonic() - self.began

    def end(self) -> int | None:
        """Waits until the budget is used up; returns the status, None if it was stopped."""
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(max(0.1, self.began + self.seconds - time.monotonic()))
        self.kill()
        self.join(2)
        how = {0: "", None: "stopped; "}.get(status, f"exit status {status}; ")
        say(self.log, self.name, status, f"{self.took:5.0f} s  {how}{self.key[:150]}")
        return status

    def kill(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(4)


def say(log: TextIO, name: str, status: int | None, key: str) -> None:
    line = f"{name:18} {'yes' if status == 0 else 'NO '} {key}"
    print(line, flush=True)
    log.write(f"==== {line}\n")


def environment() -> dict[str, str]:
    path = [str(SCRATCH / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "COLUMNS": "150"}
    if CARRIED.exists():
        commit = (CARRIED / "COMMIT").read_text().strip()
        found |= {"FASTGPT_DATA": str(CARRIED), "FASTGPT_COMMIT": commit, "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **found}


def run_group(names: list[str], args: argparse.Namespace, end: float, log: TextIO) -> Statuses:
    """Runs stages together until `end` at the latest; returns their exit statuses."""
    running, ended = [], {}
    given = {"scratch": SCRATCH, "nanogpt": "", "peer": ""}
    if args.nanogpt:
        given |= {"nanogpt": f"--nanogpt={args.nanogpt}", "peer": "nanogpt"}
    for name in names:
        stage, out = STAGES[name.lstrip("~")], args.out
        command, seconds = stage.command, args.scale * stage.seconds
        if args.rehearse:
            command = stage.tiny if stage.tiny.startswith("-m") else command + stage.tiny
        if name.startswith("~"):
            command, seconds, out = command + stage.warm, args.scale * 190, SCRATCH / "warm"
        words = [word.format(out=out, **given) for word in shlex.split(command)]
        left = end - 4 - time.monotonic()
        if left < 4:
            ended[name] = None
            say(log, name, None, "not begun: no time is left")
            continue
        nice = stage.nice if len(names) > 1 else 0
        running.append(Running(name, list(filter(None, words)), min(seconds, left), nice, log))
    try:
        return ended | {it.name: it.end() for it in sorted(running, key=lambda it: it.seconds)}
    finally:
        for it in running:
            it.kill()


def run(args: argparse.Namespace, log: TextIO) -> int:
    """Installs what was carried, runs plans and stages; returns 0 if all have passed."""
    if wheels := sorted(CARRIED.glob("*.whl")):
        pip = "-m pip install -q --no-index --no-deps --no-compile --upgrade --target"
        if subprocess.run([sys.executable, *pip.split(), SCRATCH / "site", *wheels]).returncode:
            return 3
    plans = [PLANS.get(name) or (STAGES[name].seconds + 10, [[name]]) for name in args.what]
    usual, groups = sum(plan[0] for plan in plans), [group for plan in plans for group in plan[1]]
    seconds = args.seconds or usual * (8 if args.rehearse else 1)
    args.scale = max(1.0, seconds / usual)
    ended: Statuses = {}
    for group in groups:
        if group == ["step-eager"] and ended.get("step") == 0:
            continue
        leaves = max(STAGES[name.lstrip("~")].leaves for name in group)
        end = BEGAN + seconds - (args.scale * leaves if group != groups[-1] else 0)
        ended |= run_group(group, args, end, log)
        if ended.get("env") == 2:
            return 2
    return int(any(status != 0 for status in ended.values()))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, carried = parser.add_argument, CARRIED / "nanogpt"
    add("what", nargs="*", default=["first"], metavar="NAME", help=f"stages: {' '.join(STAGES)}")
    add("--seconds", type=float, help="end of all [490, 170]; more give each stage more")
    add("--out", type=Path, default=os.environ.get("OUT"), help="folder of the records")
    add("--nanogpt", type=Path, default=carried if carried.exists() else None, help="a checkout")
    add("--rehearse", action="store_true", help="tiny shapes, for `python -m simgpu`")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.what if name not in {**PLANS, **STAGES}]:
        parser.error(f"unknown stage {unknown[0]!r}")
    # the name is the driver's, since torch would start a context
    query = "nvidia-smi -i 0 --query-gpu=name --format=csv,noheader"
    status, name = subprocess.getstatusoutput(query)
    name = "gpu" if status else re.sub(r"[^a-z0-9]+", "-", name.lower())
    args.out = (args.out or ROOT / "bench" / "results" / "local" / name).absolute()
    return args


def main(argv: list[str]) -> int:
    if argv and argv[0] in PROGRAMS:
        return PROGRAMS[argv[0]](Path(argv[1]), *argv[2:])
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: sys.exit(128 + which))
    with (args.out / "log.txt").open("a", buffering=1, encoding="utf-8") as log:
        try:
            return run(args, log)
        finally:
            text = "\n".join(digest(args.out))
            log.write(f"{text}\n")
            print(text[-9500:])
            print(f"{time.monotonic() - BEGAN:.0f} s; log and records: {args.out}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
