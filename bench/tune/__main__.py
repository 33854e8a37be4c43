"""Chooses the block sizes of attention's kernels and writes kernels/attention/tuning/*.json.

    python -m bench.tune [--static] [--arch 90] [--only TEXT ...] [--write]

Every row of a table is a slot: a pass, the width of the dtype, head dimensions, plain or not. For
each slot all candidates (blocks, warps, and for the best a bound on registers) are compiled ahead
of time in every form that the row serves. A candidate that spills, needs more shared memory than
there is or lacks its tensor-core instruction is dropped.

With --static, which needs no GPU, the rest is ranked by `bench.tune.predict`. The shipped row stays
where it is right and within MARGIN of the best, unless --write is given with --margin 0.

Without --static, on CUDA, the best of that ranking and the shipped row are checked against the
reference and timed in turn; --write then takes the measured best. Raw samples are added to
bench/results/local/<device>/<date>-tune.jsonl.

A table must work with every version of Triton: --json keeps the survivors of one version, and
--within starts from them with another. The safe table must work for every arch without one of its
own: of several such archs, each starts from the survivors of those before it.
"""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.timing import Timer
from bench.tune.search import Candidate, Slot, TileConfig, reasons, search, slots
from fastgpt.errors import UserError, counted, run_command
from fastgpt.kernels.aot import SHARED_LIMIT, TUNED, triton_minor
from fastgpt.kernels.attention.config import KEYS, TUNING, table_path
from fastgpt.kernels.proof.sass import DEVICES
from fastgpt.kernels.runtime import INTERPRETING, family

COLUMNS = (
    "M x N", "warps", "stages", "maxnreg", "registers", "predicted ms", "measured ms", "error", ""
)  # fmt: skip
MARGIN = 0.05
"""Smallest relative difference that counts; neither the model nor the clocks are more accurate."""


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["attention"]


def write(path: Path, slot: Slot, settings: TileConfig) -> None:
    """Writes these settings into the slot's row of a table."""
    table = [slot.row() | settings if slots([row]) == [slot] else row for row in read(path)]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table)
    path.write_text(f'{{\n "attention": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def own_table(arch: int) -> Path:
    """Returns the path of an architecture's own table, copied from the safe one if it has none."""
    path = TUNING / f"sm_{arch}.json"
    if not path.exists():
        path.write_text(table_path(arch).read_text(encoding="utf-8"), encoding="utf-8")
    return path


def choose(found: list[Candidate], now: TileConfig, margin: float) -> Candidate | None:
    """Returns the shipped candidate if it is within the margin of the best, else the best."""
    right = [x for x in found if not x.problems and x.time < math.inf]
    if not right:
        return None
    best = min(right, key=lambda x: x.time)
    shipped = [x for x in right if x.settings == now and x.time <= (1 + margin) * best.time]
    return shipped[0] if shipped else best


# --- what is shown --------------------------------------------------------------------------------


def shown(arch: int, slot: Slot, found: list[Candidate], now: TileConfig, top: int) -> Table:
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons(found).items()))
    right = [x for x in found if not x.problems]
    title = f"sm_{arch} {slot.name()}: {len(right)} without problems; dropped: {dropped or 'none'}"
    table = Table(*COLUMNS, title=title, title_justify="left")
    for x in found:
        mine = x.settings == now
        if not (mine or x in right[:top]):
            continue
        s = x.settings
        cells = (s["num_warps"], s["num_stages"], s.get("maxnreg", "-"), x.rows[0].registers)
        times = ["-" if x.problems else f"{x.predicted:.4f}", "-", "-"]
        if x.measured and x.measured < math.inf:
            times[1:] = f"{x.measured:.4f}", f"{x.predicted / x.measured - 1:+.0%}"
        note = "shipped" * mine + (f": {x.problems[0]}" if x.problems else "")
        table.add_row(f"{s['BLOCK_M']} x {s['BLOCK_N']}", *map(str, cells), *times, note)
    return table


def decision(chosen: Candidate | None, now: TileConfig, found: list[Candidate]) -> str:
    if chosen is None:
        return "every candidate has a problem: the shipped row stays"
    best = min(x.time for x in found if not x.problems)
    if chosen.settings == now:
        return f"the shipped row stays: {chosen.time / best - 1:.1%} slower than the best"
    return f"better than the shipped row: {chosen.settings}"


# --- command --------------------------------------------------------------------------------------


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tune",
        usage="%(prog)s [--FLAG VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--static", action="store_true", help="rank by machine code; needs no GPU")
    add("--arch", type=family, nargs="+", choices=SHARED_LIMIT, help="archs, with --static")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="only slots that contain a TEXT")
    add("--write", action="store_true", help="write the choice into the tables")
    add("--margin", type=float, default=MARGIN, help="keep the shipped row within this")
    add("--top", type=int, default=6, help="candidates shown and timed in a slot")
    add("--stages", type=int, nargs="+", help="stages to try; default: by D and dtype")
    add("--budget", type=float, default=600, help="seconds of timing in all")
    add("--out", type=Path, metavar="DIR", help="folder of the record")
    add("--json", type=Path, metavar="FILE", help="write the survivors to FILE")
    add("--within", type=Path, metavar="FILE", help="start from these survivors")
    add("--jobs", type=int, help="compilations at a time [cores]")
    return parser.parse_args(argv)


def selected(archs: Iterable[int], only: list[str]) -> list[tuple[int, Slot]]:
    return [
        (arch, slot)
        for arch in archs
        for slot in slots(read(table_path(arch)))
        if any(text in f"sm_{arch} {slot.name()}" for text in only)
    ]


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if INTERPRETING:
        raise UserError("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    if not args.static and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device to time on; use --static to rank without one")
    if not args.static:
        if args.arch:
            raise UserError("--arch needs --static; without it this machine's GPU is timed")
        from bench.tune.measure import here

        args.arch = [here()]
        if family(args.arch[0]) not in SHARED_LIMIT:
            raise UserError(f"sm_{args.arch[0]} is unknown; expected one of {[*SHARED_LIMIT]}")
    warnings.filterwarnings("ignore", "attention was never tuned")
    todo = selected(args.arch or TUNED, args.only)
    if not todo:
        raise UserError(f"no slot matches --only {' '.join(args.only)}")
    return run(args, todo)


def run(args: argparse.Namespace, todo: list[tuple[int, Slot]]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    within = json.loads(args.within.read_text(encoding="utf-8")) if args.within else None
    survivors: dict[str, list[TileConfig]] = {}
    wrong = 0
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for n, (arch, slot) in enumerate(todo):
            task = progress.add_task(f"{n + 1}/{len(todo)} sm_{arch} {slot.name()}", total=None)
            tick = partial(progress.advance, task)
            key = f"{table_path(arch).stem} {slot.name()}"
            keep = survivors.get(key, within and within.get(key, []))  # of another arch or version
            row = next(row for row in read(table_path(arch)) if slots([row]) == [slot])
            now = {k: v for k, v in row.items() if k not in KEYS}
            found = search(
                arch, slot, now, jobs=args.jobs, stages=args.stages, within=keep, tick=tick
            )
            if not args.static:
                from bench.tune.measure import time_candidates

                seconds = args.budget / len(todo)
                timer = Timer("cuda")
                time_candidates(
                    arch, slot, found, now, args.top, seconds, timer=timer, folder=args.out
                )
            progress.remove_task(task)
            chosen = choose(found, now, args.margin)
            console.print(shown(arch, slot, found, now, args.top))
            console.print(decision(chosen, now, found) + "\n", highlight=False)
            survivors[key] = [x.settings for x in found if not x.problems]
            wrong += chosen is None
            if args.write and chosen is not None:
                path = own_table(arch) if chosen.measured else table_path(arch)
                write(path, slot, chosen.settings)
    if args.json:
        args.json.write_text(json.dumps(survivors, indent=1) + "\n", encoding="utf-8")
    archs = sorted({family(arch) for arch, _ in todo})
    stated = ", ".join(f"sm_{arch}: {DEVICES[arch].ghz} GHz" for arch in archs)
    how = "predicted, not measured" if args.static else "measured"
    counts = f"{counted(len(todo), 'slot')}, {wrong} without a usable candidate"
    print(f"{counts}; Triton {triton_minor()}; {how}; {stated}")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_command(main)
