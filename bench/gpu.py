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
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fastgpt.commands import installed

BEGAN, STARTED = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S")
ROOT = Path(__file__).parents[1]
CARRIED = ROOT / ".gpu"
"""Folder with wheels, tinyshakespeare.txt, nanogpt and COMMIT, for a machine without network."""
SCRATCH = ROOT / "build" / "gpu"
Statuses = dict[str, int | None]
SHOWN = ("tok_per_s", "mfu", "peak_bytes", "first_step_s")


class Stage(NamedTuple):
    """Arguments of Python with a budget in seconds, which is for an H100 and 16 cores."""

    seconds: int
    command: str
    tiny: str = ""  # what a rehearsal appends; a command that begins with -m it runs instead
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


def _bench(seconds: int, ops: str, sizes: str) -> Stage:
    command = f"-m bench --device cuda --out {{out}} --op {ops} --size {sizes}"
    tiny = f" --op {ops.split()[0]} --size tiny --rounds 2"  # the last flag of a name counts
    return Stage(seconds, command, tiny, warm=" --rounds 2")


STAGES = {
    "env": Stage(60, "-m bench.gpu _env {out}"),
    "step": Stage(190, STEP % (16, "'fastgpt triton, fp32 residual' compiled"),
                  " --tiny --rounds 1 --batch 2", leaves=150),
    "step-eager": Stage(70, STEP % (16, "") + " --compile off", " --tiny --rounds 1 --batch 2"),
    "parity": Stage(190, f"{TESTS} -k 'not ({LATER})' tests/kernels/cuda", FEW % "bf16", leaves=95),
    "model": Stage(190, f"{TESTS} -n 4 -k 'not ({LATER})' {MODEL}",
                   " -n 0 -k waits_for_nothing", nice=5),
    "lecture": Stage(230, "-m bench.reproduce --only \"G'\" --runs build/gpu/runs --out {out}",
                     "-m bench.gpu _train {out} lecture-gpt-full" + SMALL, leaves=95),
    "char": Stage(200, "-m bench.gpu _train {out} shakespeare-char" + TRITON, SMALL, nice=5),
    "resume": Stage(150, "-m bench.gpu _resume {out} shakespeare-char --steps 30 --eval-every 0"
                    " --log-every 1 --save-every 3 --train.keep-checkpoints 9"
                    " --train.sample-tokens 0 --data.eval-tokens 16384" + TRITON, SMALL, nice=5),
    "bench-attention": _bench(80, "attention attention_packed", "gpt2-124m"),
    "bench-norm": _bench(50, "layer_norm add_layer_norm", "gpt2-124m n768"),
    "bench-loss": _bench(70, "cross_entropy linear_cross_entropy bias_act", "gpt2 gpt2-124m"),
    "tune": Stage(80, "-m bench.tune --out {out} --only 'bits D=64 plain' --top 4 --budget 12",
                  " --static --arch 90 --only 'sm_90 dq 16 bits D=64 plain'",
                  warm=" --budget 1"),
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


def record(out: Path, case: str, figure: float = 0, *, why: str = "", **more: Any) -> None:
    """Adds a record of the case, with a figure or the reason why there is none."""
    from torch import cuda

    from bench import measure, records

    found = None if why else measure.quantiles([figure])
    row = records.record(case, "fastgpt", found, why=why, **more)
    records.Writer("cuda" if cuda.is_available() else "cpu", out).write(row)


def env(out: Path) -> int:
    """Records and prints what is installed; returns 1 if a package is missing, 2 without CUDA."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = *project["dependencies"], "pytest", "pytest-xdist", "hypothesis"
    if missing := [x for x in needed if installed(re.split("[>=;]", x)[0]) is None]:
        print(f"not installed: {', '.join(missing)}")
        return 1
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device; `python -m simgpu -m bench.gpu --rehearse` needs none")
        return 2
    subprocess.run("nvidia-smi; nproc; free -g; df -h .; gcc --version; nvcc --version", shell=True)
    record(out, "machine/environment", torch.cuda.device_count(), unit="GPUs", python=sys.version)
    print(torch.cuda.get_device_name(), torch.__version__, sys.version)
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
    losses = {x["step"]: x["val_loss"] for x in read(folder / "metrics.jsonl") if "val_loss" in x}
    why, best = "" if losses else "no validation loss is logged", min(losses.values(), default=0)
    record(out, f"train/{flags[0]}", best, why=why, unit="nats", val_loss=losses)
    return done.returncode


def resume(out: Path, *flags: str) -> int:
    """Trains twice under torchrun and resumes one run; records whether the weights are the same."""
    from safetensors.torch import load_file

    runs = SCRATCH / "resume"
    shutil.rmtree(runs, ignore_errors=True)

    def begin(run: str, port: int, *flags: str) -> subprocess.Popen[bytes]:
        words = f"-m torch.distributed.run --nproc_per_node=1 --master-port={port} train.py"
        return subprocess.Popen([sys.executable, *words.split(), *flags, "--run-dir", runs / run])

    both = [begin(run, 29501 + n, *flags) for n, run in enumerate("ab")]
    ended = [process.wait() for process in both]
    ended.append(begin("c", 29511, "--resume", f"{runs}/a/checkpoints/step_00000003").wait())
    for run in "bc" if not any(ended) else ():
        last = (max((runs / name / "checkpoints").glob("step_*")) for name in ("a", run))
        a, other = (load_file(folder / "model.safetensors") for folder in last)
        differ = [name for name in a if not a[name].equal(other[name])]
        why = f"{len(differ)} of {len(a)} tensors differ" if differ else ""
        record(out, f"resume/a {run}", len(a), why=why, unit="equal tensors", differ=differ)
    return max(map(abs, ended))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields records; a line that a killed process left unfinished does not count."""
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def digest(out: Path) -> Iterator[str]:
    """Yields the figures that the stages have recorded since this process began."""
    rows = [row for path in sorted(out.glob("*.jsonl")) for row in read(path)]
    outcomes, figures = dict[str, str](), defaultdict[str, list[str]](list)
    for row in (row for row in rows if row.get("run", "") >= STARTED):
        case, who, figure = row["case"], row["implementation"], row["figure"]
        if case.startswith("test/"):
            outcomes[case[5:]] = row.get("why", "passed")
        elif not figure:
            yield f"no figure: {case} {who}: {row['why'][:150]}"
        else:
            unit, scale = ("ms", 1e3) if row["unit"] == "s" else (row["unit"], 1)
            figures[f"{case}, {unit}"].append(f"{who} {scale * figure['p50']:.4g}")
        if about := {key: row[key] for key in SHOWN if row.get(key)} | row.get("parts", {}):
            yield f"{case} {who}: {', '.join(f'{key} {x:.4g}' for key, x in about.items())}"
        for kernel, ms, launches in row.get("kernels", [])[:40]:
            yield f"{ms:9.3f} ms {launches:6.1f} x  {kernel[:80]}"
    yield f"tests: {dict(Counter(outcomes.values()))}"
    yield from [f"FAILED {test[-150:]}" for test in outcomes if outcomes[test] == "failed"][:25]
    yield from (f"{case}: {', '.join(found)}" for case, found in figures.items())


def start(name: str, args: argparse.Namespace) -> tuple[subprocess.Popen, float]:
    """Starts a stage, whose lines go to the log at once; returns it and its budget in seconds."""
    stage = STAGES[name.lstrip("~")]
    command, seconds, nice, out = stage.command, stage.seconds, stage.nice, args.out
    if args.rehearse:
        command = stage.tiny if stage.tiny.startswith("-m") else command + stage.tiny
    if name.startswith("~"):
        command, seconds, nice, out = command + stage.warm, 190, 10, SCRATCH / "warm"
    words = shlex.split(command.format(out=shlex.quote(str(out)), peers=args.peers))
    python = shlex.join(["nice", "-n", str(nice), sys.executable, *words])
    # not a pipe of ours: the log outlives this process
    line = f"set -o pipefail; {python} 2>&1 | sed -u 's/^/{name}| /' >>{shlex.quote(str(args.log))}"
    say(args, f"{name}| $ {python}")
    options = {"cwd": ROOT, "env": args.environment, "process_group": 0}
    return subprocess.Popen(["bash", "-c", line], **options), args.scale * seconds


def say(args: argparse.Namespace, text: str) -> None:
    with args.log.open("a", encoding="utf-8") as log:
        print(text, file=log)


def kill(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(4)


def run_group(names: list[str], args: argparse.Namespace, end: float) -> Statuses:
    """Runs stages together until `end` at the latest; returns their exit statuses."""
    began, ended, running = time.monotonic(), Statuses(), {}
    try:
        for name in names:
            if end - began > 8:
                running[name] = start(name, args)
            else:
                print(f"{name:18} NO  not begun: no time is left", flush=True)
        while running:
            time.sleep(0.1)
            for name, (process, seconds) in [*running.items()]:
                took = time.monotonic() - began
                if process.poll() is None and took < min(seconds, end - 4 - began):
                    continue
                ended[name] = status = process.returncode
                kill(process)
                del running[name]
                lines = args.log.read_text("utf-8", "replace").splitlines()
                last = [x for x in lines if x.startswith(f"{name}| ")][-1].partition("| ")[2][:150]
                how = {0: "yes", None: "NO  stopped;"}.get(status, f"NO  exit status {status};")
                print(f"{name:18} {how} {took:.0f} s  {last}", flush=True)
                say(args, f"==== {name} {how} {took:.0f} s")
    finally:
        for process, _ in running.values():
            kill(process)
    return dict.fromkeys(names) | ended


def run(args: argparse.Namespace) -> int:
    """Installs what was carried, runs plans and stages; returns 0 if all have passed."""
    if wheels := sorted(CARRIED.glob("*.whl")):
        pip = "-m pip install -q --no-index --no-deps --no-compile --upgrade --target"
        if subprocess.run([sys.executable, *pip.split(), SCRATCH / "site", *wheels]).returncode:
            return 3
    path = [str(SCRATCH / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    args.environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    if CARRIED.exists():
        found = {"FASTGPT_COMMIT": (CARRIED / "COMMIT").read_text().strip(), "HF_HUB_OFFLINE": "1"}
        args.environment |= {**found, "FASTGPT_DATA": str(CARRIED)}
    plans = [PLANS.get(name) or (STAGES[name].seconds + 10, [[name]]) for name in args.what]
    usual, groups = sum(plan[0] for plan in plans), [group for plan in plans for group in plan[1]]
    seconds = args.seconds or usual * (8 if args.rehearse else 1)
    args.scale = max(1.0, seconds / usual)
    ended = Statuses()
    for group in groups:
        if group == ["step-eager"] and ended.get("step") == 0:
            continue
        leaves = max(STAGES[name.lstrip("~")].leaves for name in group)
        end = BEGAN + seconds - (args.scale * leaves if group != groups[-1] else 0)
        ended |= run_group(group, args, end)
        if ended.get("env") == 2:
            return 2
    return int(any(status != 0 for status in ended.values()))


def main(argv: list[str]) -> int:
    programs = {"_env": env, "_tests": tests, "_train": train, "_resume": resume}
    if argv and argv[0] in programs:
        return programs[argv[0]](Path(argv[1]), *argv[2:])
    layout, carried = argparse.RawDescriptionHelpFormatter, CARRIED / "nanogpt"
    parser = argparse.ArgumentParser("python -m bench.gpu", None, __doc__, formatter_class=layout)
    add, local = parser.add_argument, os.environ.get("OUT", ROOT / "bench/results/local")
    add("what", nargs="*", default=["first"], metavar="NAME", help=f"stages: {' '.join(STAGES)}")
    add("--seconds", type=float, help="end of all [490, 170]; more give each stage more")
    add("--out", type=Path, default=local, help="folder of the records and logs")
    add("--nanogpt", type=Path, default=carried if carried.exists() else None, help="a checkout")
    add("--rehearse", action="store_true", help="tiny shapes, for `python -m simgpu`")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.what if name not in {**PLANS, **STAGES}]:
        parser.error(f"unknown stage {unknown[0]!r}")
    args.peers = f"nanogpt --nanogpt={shlex.quote(str(args.nanogpt))}" if args.nanogpt else ""
    args.out = Path(args.out).absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    args.log = args.out / "log.txt"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: sys.exit(128 + which))
    try:
        return run(args)
    finally:
        say(args, text := "\n".join(digest(args.out)))
        print(text[-9500:])
        print(f"{time.monotonic() - BEGAN:.0f} s; log and records: {args.out}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
