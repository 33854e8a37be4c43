"""Runs every check and benchmark that needs a GPU: `make gpu`, or `python3 -m bench.gpu first`.

    first      a training step beside its peers, tests, short trainings, then ops beside theirs
    second     a step with a larger batch, the other dtypes, a thousand repeats
    NAME ...   stages by name, one after the other

A stage is a process group with a time budget. Lines go to log.txt at once, records to *.jsonl; a
digest of these ends the output. docs/gpus.md has more.
"""

import argparse
import filecmp
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fastgpt.commands import installed
from fastgpt.logs.metrics import read_records

BEGAN, STARTED = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S")
ROOT = Path(__file__).parents[1]
SCRATCH, CARRIED = ROOT / "build" / "gpu", ROOT / ".gpu"
"""CARRIED has wheels, tinyshakespeare.txt, nanogpt and COMMIT, for a machine without network."""


class Stage(NamedTuple):
    """Arguments of Python with a budget in seconds, which is for an H100 and 16 cores."""

    seconds: int
    command: str
    tiny: str = ""  # what a rehearsal appends; the last flag of a name counts
    warm: str = ""  # what the stage `~NAME` appends: it fills caches, its records are thrown away
    nice: int = 0  # how far the stages beside it that are worth more go first
    leaves: int = 0  # seconds that it does not take from the stages behind it


STEP = (
    "-m bench.step --out {out} --parallel-start --explain --trace --rounds 6 --batch %d"
    " --implementations 'fastgpt triton' %s {peers}"
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
BENCH = "-m bench --device cuda --out {out} --op"
QUICK = " --size tiny --rounds 2", " --rounds 2"

STAGES = {
    "env": Stage(60, "-m bench.gpu _env {out}"),
    "step": Stage(190, STEP % (16, "'fastgpt triton, fp32 residual' compiled"),
                  " --tiny --rounds 1 --batch 2", leaves=150),
    "step-eager": Stage(70, STEP % (16, "") + " --compile off", " --tiny --rounds 1 --batch 2"),
    "parity": Stage(190, f"{TESTS} -k 'not ({LATER})' tests/kernels/cuda", FEW % "bf16", leaves=95),
    "model": Stage(190, f"{TESTS} -n 4 -k 'not ({LATER})' {MODEL}",
                   " -n 0 -k waits_for_nothing", nice=5),
    "lecture": Stage(230, "-m bench.reproduce --only \"G'\" --out {out}", " --render", leaves=95),
    "char": Stage(200, "-m bench.gpu _train {out} shakespeare-char" + TRITON, SMALL, nice=5),
    "resume": Stage(150, "-m bench.gpu _resume {out} shakespeare-char --steps 30 --eval-every 0"
                    " --log-every 1 --save-every 3 --train.keep-checkpoints 9"
                    " --train.sample-tokens 0 --data.eval-tokens 16384" + TRITON, SMALL, nice=5),
    "bench-attention": Stage(80, f"{BENCH} attention attention_packed --size gpt2-124m", *QUICK),
    "bench-norm": Stage(50, f"{BENCH} layer_norm add_layer_norm --size gpt2-124m n768", *QUICK),
    "bench-loss": Stage(70, f"{BENCH} cross_entropy linear_cross_entropy bias_act"
                        " --size gpt2 gpt2-124m", *QUICK),
    "tune": Stage(80, "-m bench.tune --out {out} --only 'bits D=64 plain' --top 4 --budget 12",
                  " --static --arch 90 --only 'sm_90 dq 16 bits D=64 plain'", " --budget 1"),
    "step64": Stage(150, STEP % (64, "compiled"), " --tiny --rounds 1 --batch 4", leaves=30),
    "rest": Stage(150, f"{TESTS} -k '{LATER}' tests/kernels/cuda {MODEL}", FEW % "fp32"),
}  # fmt: skip
PLANS = {
    "first": (490, (
        ["env"], ["step"], ["step-eager"],  # the last one only if ours took no step
        ["parity", "lecture", "model", "resume", "char",
         "~bench-attention", "~bench-norm", "~bench-loss", "~tune"],
        ["bench-attention"], ["bench-norm"], ["bench-loss"], ["tune"],
    )),
    "second": (170, (["env"], ["step64"], ["rest"])),
}  # fmt: skip
"""Seconds in all, and groups of stages, most valuable first. A group's stages run together."""


def record(out: Path, case: str, figure: float, *, why: str = "", **more: Any) -> None:
    """Adds a record of the case, with a figure or the reason why there is none."""
    from bench import measure, records
    from fastgpt.device.device import pick_device

    found = None if why else measure.quantiles([figure])
    row = records.record(case, "fastgpt", found, why=why, **more)
    records.Writer(pick_device("auto", "--device"), out).write(row)


def env(out: Path) -> int:
    """Prints and records what the machine has; returns 1 without a package, 2 without CUDA."""
    needed = "torch triton numpy rich tyro safetensors matplotlib pytest pytest-xdist hypothesis"
    if missing := [name for name in needed.split() if installed(name) is None]:
        print(f"not installed: {', '.join(missing)}")
        return 1
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device; `python -m simgpu -m bench.gpu --rehearse` needs none")
        return 2
    record(out, "environment", torch.cuda.device_count(), unit="GPUs", python=sys.version)
    subprocess.run("nproc; free -g; df -h .; gcc --version; nvidia-smi; nvidia-smi -L", shell=True)
    return 0


def tests(out: Path, *arguments: str) -> int:
    """Runs pytest and records the outcome of each test as soon as it is known."""
    import pytest

    class Outcomes:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                why = "" if report.outcome == "passed" else report.outcome
                record(out, f"test/{report.nodeid}", report.duration, why=why)

    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", *arguments]
    return pytest.main(options, plugins=[Outcomes()])


def train(out: Path, *flags: str) -> int:
    """Trains, then records the losses that the run has logged."""
    folder = SCRATCH / "runs" / flags[0]
    shutil.rmtree(folder, ignore_errors=True)
    done = subprocess.run([sys.executable, "train.py", *flags, "--run-dir", str(folder)])
    log = read_records(folder / "metrics.jsonl")
    if losses := {row["step"]: row["val_loss"] for row in log if "val_loss" in row}:
        record(out, f"train/{flags[0]}", min(losses.values()), unit="nats", val_loss=losses)
    return done.returncode


def resume(out: Path, *flags: str) -> int:
    """Trains and resumes under torchrun; records whether both runs end with the same weights."""
    runs, weights = SCRATCH / "resume", list[Path]()
    shutil.rmtree(runs, ignore_errors=True)
    again = "--resume", str(runs / "a" / "checkpoints" / "step_00000003")
    torchrun = "-m", "torch.distributed.run", "--nproc_per_node=1", "--master-port=29511"
    for run, given in (("a", flags), ("b", again)):
        command = [sys.executable, *torchrun, "train.py", *given, "--run-dir", str(runs / run)]
        if status := subprocess.run(command).returncode:
            return status
        weights.append(max((runs / run / "checkpoints").glob("step_*")) / "model.safetensors")
    why = "" if filecmp.cmp(*weights, shallow=False) else "the weights differ"
    record(out, "resume/a b", 1, why=why, unit="equal file")
    return 0


def digest(out: Path) -> Iterator[str]:
    """Yields the figures that the stages have recorded since this process began."""
    rows = [row for path in sorted(out.glob("*.jsonl")) for row in read_records(path)]
    outcomes, figures = (defaultdict[str, list[str]](list) for _ in range(2))
    for row in (row for row in rows if row.get("run", "") >= STARTED):
        case, who, figure = row["case"], row["implementation"], row["figure"]
        if case.startswith("test/"):
            outcomes[row.get("why", "passed")].append(case[5:])
        elif not figure:
            yield f"no figure: {case} {who}: {row['why'][:150]}"
        else:
            unit, scale = ("ms", 1e3) if row["unit"] == "s" else (row["unit"], 1)
            figures[f"{case}, {unit}"].append(f"{who} {scale * figure['p50']:.4g}")
        if row.get("tok_per_s"):
            keys = filter(row.get, ("tok_per_s", "mfu", "peak_bytes", "first_step_s"))
            about = {key: row[key] for key in keys} | row.get("parts", {})
            yield f"{case} {who}: {', '.join(f'{key} {x:.4g}' for key, x in about.items())}"
        for kernel, ms, launches in row.get("kernels", [])[: 40 if who == "fastgpt triton" else 8]:
            yield f"{ms:9.3f} ms {launches:6.1f} x  {kernel[:80]}"
    yield f"tests: { ({outcome: len(found) for outcome, found in outcomes.items()}) }"
    yield from (f"FAILED {test[-150:]}" for test in outcomes["failed"][:25])
    yield from (f"{case}: {', '.join(found)}" for case, found in figures.items())
    yield f"{time.monotonic() - BEGAN:.0f} s; log and records: {out}"


def start(name: str, args: argparse.Namespace) -> tuple[subprocess.Popen, float]:
    """Starts a stage, whose lines sed adds to the log; returns it and its budget in seconds."""
    stage = STAGES[name.lstrip("~")]
    command, seconds, nice, out = stage.command, stage.seconds, stage.nice, args.out
    if args.rehearse:
        command += stage.tiny
    if name.startswith("~"):
        command, seconds, nice, out = command + stage.warm, 190, 10, SCRATCH / "warm"
    command = command.format(out=shlex.quote(str(out)), peers=args.peers)
    python = f"nice -n {nice} {shlex.quote(sys.executable)} {command}"
    print(f"{name}| $ {python}", file=args.log)
    line = f"set -o pipefail; {python} 2>&1 | sed -u 's/^/{name}| /'"
    options = {"cwd": ROOT, "env": args.environment, "process_group": 0, "stdout": args.log}
    return subprocess.Popen(["bash", "-c", line], **options), args.scale * seconds


def kill(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            end = time.monotonic() + 4
            while time.monotonic() < end:  # bash ends at once, what it has started may take longer
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def run_group(names: list[str], args: argparse.Namespace, end: float) -> dict[str, int | None]:
    """Runs stages together until `end` at the latest; returns their exit statuses."""
    began, ended, running = time.monotonic(), dict[str, int | None](), {}
    try:
        for name in names:
            running[name] = start(name, args)
        while running:
            time.sleep(0.1)
            for name, (process, seconds) in [*running.items()]:
                took = time.monotonic() - began
                if process.poll() is None and took < min(seconds, end - 4 - began):
                    continue
                ended[name] = status = process.returncode
                kill(running.pop(name)[0])
                lines = Path(args.log.name).read_text("utf-8", "replace").splitlines()
                last = [x for x in lines if x.startswith(f"{name}| ")][-1].partition("| ")[2][:150]
                how = {0: "yes", None: "NO  stopped;"}.get(status, f"NO  exit status {status};")
                for file in (None, args.log):
                    print(f"{name:18} {how} {took:.0f} s  {last}", file=file, flush=True)
    finally:
        for process, _ in running.values():
            kill(process)
    return ended


def run(args: argparse.Namespace) -> int:
    """Runs plans and stages beside what was carried; returns 0 if all have passed."""
    for wheel in CARRIED.glob("*.whl"):
        shutil.unpack_archive(wheel, SCRATCH / "site", "zip")
    path = os.pathsep.join(map(str, (SCRATCH / "site", ROOT, os.environ.get("PYTHONPATH", ""))))
    args.environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if CARRIED.exists():
        found = {"FASTGPT_COMMIT": (CARRIED / "COMMIT").read_text().strip(), "HF_HUB_OFFLINE": "1"}
        args.environment |= {**found, "FASTGPT_DATA": str(CARRIED)}
    plans = [PLANS.get(name) or (STAGES[name].seconds + 10, [[name]]) for name in args.what]
    usual, groups = sum(plan[0] for plan in plans), [group for plan in plans for group in plan[1]]
    seconds = args.seconds or usual * (8 if args.rehearse else 1)
    args.scale, ended = max(1.0, seconds / usual), dict[str, int | None]()
    for group in groups:
        if group != ["step-eager"] or ended.get("step") != 0:
            leaves = group != groups[-1] and max(STAGES[x.lstrip("~")].leaves for x in group)
            ended |= run_group(group, args, BEGAN + seconds - args.scale * leaves)
        if ended.get("env") == 2:
            return 2
    return int(any(status != 0 for status in ended.values()))


def main(argv: list[str]) -> int:
    programs = {"_env": env, "_tests": tests, "_train": train, "_resume": resume}
    if argv and argv[0] in programs:
        return programs[argv[0]](Path(argv[1]), *argv[2:])
    layout, carried = argparse.RawDescriptionHelpFormatter, CARRIED / "nanogpt"
    parser = argparse.ArgumentParser("python -m bench.gpu", None, __doc__, formatter_class=layout)
    add, local = parser.add_argument, os.environ.get("OUT", f"{ROOT}/bench/results/local")
    add("what", nargs="*", default=["first"], metavar="NAME", help=f"stages: {' '.join(STAGES)}")
    add("--seconds", type=float, help="end of all [490, 170]; more give each stage more")
    add("--out", type=os.path.abspath, default=local, help="folder of the records and the log")
    add("--nanogpt", type=Path, default=carried if carried.exists() else None, help="a checkout")
    add("--rehearse", action="store_true", help="tiny shapes, for `python -m simgpu`")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.what if name not in {**PLANS, **STAGES}]:
        parser.error(f"unknown stage {unknown[0]!r}")
    args.peers = f"nanogpt --nanogpt={shlex.quote(str(args.nanogpt))}" if args.nanogpt else ""
    (out := Path(args.out)).mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: sys.exit(128 + which))
    with (out / "log.txt").open("a", 1, "utf-8") as args.log:
        try:
            return run(args)
        finally:
            print(text := "\n".join(digest(out)), file=args.log)
            print(text[-9500:], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
