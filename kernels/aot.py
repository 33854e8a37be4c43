"""Compiles every shipped configuration of every kernel, without a GPU, and checks the machine code.

    python -m kernels.aot [--op norm] [--arch 80 90] [--only TEXT ...] [--static]
    python -m kernels.aot --base [COMMIT]

The `variants` of each op's `Spec` call its launchers with tensors on the meta device, and
`runtime.launch` records what they would launch on a device of that arch, so what is compiled here
is what is launched there: the same table look-ups, constexprs, warps, stages and specialisations. A
case also declares which tensor-core instruction its matrix products must become.

The exit status is 1 for a spilled register, more shared memory than the arch has, a kernel without
its declared instruction, and a loop that waits for a load that it has just asked for.

--base compares with a commit. It compiles the variants whose source, settings or fences differ, and
executes for sm_90 the structural problems of the ops with changed files. More registers, memory,
instructions or clocks, a loop that waits, fewer proxy fences, a lost tensor-core instruction, a
variant that is gone, a fault, and another bit of a result are worse and exit with 1. Without COMMIT
it is HEAD if files of kernels/ are changed, else its parent. A line `Kernel-cost: TEXT` in the
message of a later commit accepts findings that contain TEXT, but no spill, wait, fault or error.
--static adds the load of each unit in each main loop and the speed limit that follows
(kernels.proof.sass). sm_103 and 121 count as sm_100 and 120.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from .proof.compile import CompileResult, Config, compile_all, fingerprint
from .proof.report import OPS, configs_of, folder, report, specs_of, unknown
from .proof.rules import ARCHS, Report, aligned, compare, show, wrong
from .proof.sass import DEVICES, UNITS
from .runtime import INTERPRETING, family

ROOT = Path(__file__).resolve().parents[1]
NOT_SHARED = {f"{name}.py" for name in ("alias", "aot", "hub", "layers", "upgrade")}
"""Files of kernels/ that no op uses."""


class BadUsageError(Exception):
    """Error for a request that cannot be met; the message says why."""


# --- tables ---------------------------------------------------------------------------------------


def table(rows: Iterable[CompileResult]) -> str:
    lines: list[tuple[str, ...]] = [
        ("kernel", "arch", "configuration", "warps", "regs", "spilled", "shared", "mma")
    ]
    for r in rows:
        mma = " ".join(f"{name} {n}" for name, n in r.mma.items())
        numbers = (r.warps, r.registers, r.spilled, r.shared)
        lines.append((r.kernel, f"sm_{r.arch}", r.config, *map(str, numbers), mma or "-"))
    return aligned(lines)


def static_table(rows: Iterable[CompileResult]) -> str:
    """Formats a table of innermost loops: a warp's instructions per iteration, and the speed."""
    units = (*UNITS, "alu", "uniform")
    lines = [("kernel", "arch", "configuration", "loop", *units,
              "blocks/SM", "warps/SM", "bound", "clocks", "TFLOP/s", "GB/s")]  # fmt: skip
    for r in rows:
        for loop in r.loops:
            top = r.ceiling(loop)
            if top is None:
                continue
            shown = (top.blocks, top.blocks * r.warps, top.bound, f"{top.clocks:.0f}",
                     f"{top.tflops:.0f}" if top.tflops else "-", f"{top.gbytes:.0f}")  # fmt: skip
            counts = (loop.units.get(unit, 0) for unit in units)
            name = (r.kernel, f"sm_{r.arch}", r.config, f"{loop.start:04x}")
            lines.append((*name, *map(str, counts), *map(str, shown)))
    stated = (f"sm_{a}: {d.multiprocessors} SMs at {d.ghz} GHz" for a, d in DEVICES.items())
    return f"{aligned(lines)}\n{', '.join(stated)}"


# --- against a commit -----------------------------------------------------------------------------


def git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        raise BadUsageError("--base needs git, which was not found") from None
    if done.returncode:
        raise BadUsageError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def usual_base() -> str:
    return "HEAD" if git("status", "--porcelain", "kernels") else "HEAD~1"


def touched_since(commit: str) -> list[str]:
    """Returns the folders of ops with files that differ; all if a file that several use does."""
    differ = git("diff", "--name-only", commit, "--", "kernels").decode().split()
    new = git("ls-files", "--others", "--exclude-standard", "--", "kernels").decode().split()
    parts = [Path(file).parts[1:] for file in (*differ, *new)]
    shared = {part[0] for part in parts if len(part) == 1} - NOT_SHARED
    return [op for op in OPS if shared or any(part[0] == op for part in parts)]


def report_at(
    commit: str, known: Iterable[str], touched: Sequence[str], args: argparse.Namespace
) -> Report:
    """Reports what the kernels of a commit are compiled to, read by the present code."""
    with tempfile.TemporaryDirectory() as place:
        there = Path(place)
        files = git("archive", commit, "fastgpt", "kernels")
        subprocess.run(["tar", "-x", "-C", place], input=files, check=True)
        shutil.rmtree(there / "kernels" / "proof", ignore_errors=True)
        shutil.copytree(ROOT / "kernels" / "proof", there / "kernels" / "proof")
        (there / "known.json").write_text(json.dumps(list(known)), encoding="utf-8")
        asked = ["--arch", *map(str, args.arch), "--jobs", str(args.jobs)]
        asked += ["--op", *args.op] if args.op else []
        command = [sys.executable, "-m", "fastgpt.kernels.proof.report", *asked]
        command += ["--known", str(there / "known.json"), "--touched", *touched]
        command += ["--out", str(there / "report.json")]
        paths = [place, str(ROOT / "simgpu" / "src"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, env=env, cwd=place, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise BadUsageError(f"the kernels of {commit} cannot be read: see above")
        return json.loads((there / "report.json").read_text(encoding="utf-8"))


def compare_with(commit: str, configs: Sequence[Config], args: argparse.Namespace) -> int:
    """Compares configurations with a commit's; returns the number of worse findings."""
    commit = git("rev-parse", "--short", f"{commit}^{{commit}}").decode().strip()
    touched = touched_since(commit)
    old = report_at(commit, map(fingerprint, configs), touched, args)
    new = unknown(configs, old["fingerprints"])
    trailers = "--format=%(trailers:key=Kernel-cost,valueonly,unfold)"
    log = git("log", trailers, f"{commit}..HEAD").decode()
    accepted = [line.strip() for line in log.splitlines() if line.strip()]
    specs = [spec for spec in specs_of(args.op or ()) if folder(spec) in touched]
    found = compare(old, report(new, specs, [90], jobs=args.jobs))
    worse = show(found, accepted)
    print(f"{len(new)} of {len(configs)} variants differ from {commit}, {worse} findings are worse")
    return worse


# --- command --------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.aot",
        usage="%(prog)s [--FLAG VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", type=family, nargs="+", default=ARCHS, choices=ARCHS, help="GPU archs")
    add(
        "--op",
        nargs="+",
        choices=OPS,
        metavar="OP",
        help="only the kernels of these folders, such as norm",
    )
    add("--only", nargs="+", default=[""], metavar="TEXT", help="only names that contain a TEXT")
    add("--base", nargs="?", const="", metavar="COMMIT", help="compare with a commit")
    add("--static", action="store_true", help="show the speed limit of each main loop")
    add("--jobs", type=int, default=os.cpu_count(), help="compilations at a time [cores]")
    return parser.parse_args(argv)


def check(configs: Sequence[Config], jobs: int | None = None, *, static: bool = False) -> int:
    """Compiles configurations and shows them; returns how many break a rule."""
    rows = list(compile_all(configs, jobs))
    print(table(rows))
    if static:
        print(f"\n{static_table(rows)}\n")
    broken = {row.key: problems for row in rows if (problems := wrong(row))}
    for key, problems in broken.items():
        print(f"{key}: {'; '.join(problems)}")
    print(f"{len(rows)} variants, {len(broken)} wrong")
    return len(broken)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if INTERPRETING:
            raise BadUsageError("unset TRITON_INTERPRET, because the interpreter compiles nothing")
        found = configs_of(args.arch, args.op or ())
        configs = [c for c in found if any(text in c.key for text in args.only)]
        if not configs:
            asked = f"--op {' '.join(args.op)}" if args.op else f"--only {' '.join(args.only)}"
            raise BadUsageError(f"no configuration matches {asked}")
        if args.base is not None and (args.static or args.only != [""]):
            raise BadUsageError("--base takes neither --only nor --static")
        if args.base is None:
            return int(check(configs, args.jobs, static=args.static) > 0)
        return int(compare_with(args.base or usual_base(), configs, args) > 0)
    except BadUsageError as error:
        print(f"kernels.aot: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
