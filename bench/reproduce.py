"""Trains every system of the lecture as published: `python -m bench.reproduce [--only A B]`.

Each system is one `python train.py RECIPE`. Its losses are recorded, and a table is written from
all records: into bench/results/local, or with `--publish` beside the committed records and into
docs/reproduction.md. A system that has a record is not trained again, and an interrupted run is
resumed: the same command finishes what is left.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from bench import records
from fastgpt import flags
from fastgpt.cli import configure
from fastgpt.config.config import Config, to_json
from fastgpt.convert.saved import from_json
from fastgpt.device import device
from fastgpt.errors import UserError, run_command, unknown_name, writing
from fastgpt.files import write_atomically
from fastgpt.logs.metrics import read_records

ROOT = Path(__file__).parent.parent
NAME = "reproduction"
PAGE = ROOT / "docs" / "reproduction.md"
BEGIN, END = "<!-- written by bench.reproduce -->", "<!-- to here -->"
"""Marks on the page: the text between them comes from the records, the rest is typed."""


# --- what was published ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A published loss, in nats for each token."""

    step: int
    published: float
    band: float = 0.05
    """Largest deviation allowed: other random numbers change each loss by a few hundredths."""
    key: str = "val_loss"
    """Metric of the run: `val_loss`, a mean over 200 random batches, or `train_loss`, of one."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """A step of the lecture: a model with its published losses."""

    letter: str
    recipe: str
    about: str
    targets: tuple[Target, ...]
    seeds: tuple[int, ...] = (1337, 1, 2)
    """Seeds, with one run each; the mean of their losses is compared with the published one."""
    on_cpu: bool = True
    """True if two CPU cores train it in minutes."""


SYSTEMS = (
    System(
        "A", "lecture-bigram", "a bigram model",
        (
            Target(10_100, 2.49, note="the published text has no validation loss; 2.49 is what"
                   " other people's runs of these settings gave"),
            # single batches scatter by 0.07
            Target(10_100, 2.45, band=0.15, key="train_loss", note="training loss of one batch"),
        ),
    ),
    System("B", "lecture-head", "one attention head", (Target(1000, 2.5303), Target(4500, 2.4084))),
    System("C", "lecture-multihead", "four heads", (Target(4500, 2.2858),)),
    System(
        "D", "lecture-feedforward", "four heads and a feed-forward layer",
        (Target(4500, 2.2411),),
    ),
    System(
        "E", "lecture-residual", "three blocks with residual connections",
        (Target(4500, 2.1174),),
    ),
    System("F", "lecture-layernorm", "three blocks with LayerNorm", (Target(4500, 2.0819),)),
    System(
        "H", "lecture-gpt-small", "a GPT, 4 layers of width 64",
        (Target(5000, 1.82, note="from the lecture's own run"),), seeds=(1337,),
    ),
    System(
        "G", "lecture-gpt", "a GPT, 6 layers of width 192, dropout",
        (Target(1000, 1.7604), Target(2000, 1.5939)), seeds=(1337,),
    ),
    System(
        "G'", "lecture-gpt-full", "like G with width 384, context 256",
        (Target(5000, 1.48, note="reported elsewhere, not in the published text"),),
        seeds=(1337,), on_cpu=False,
    ),
)  # fmt: skip


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduce:
    """Trains the systems of the lecture and compares their losses with the published ones."""

    only: tuple[str, ...] = ()
    """Systems to train, by letter or recipe; by default all except G', which needs a GPU."""
    gpt_steps: int = 1000
    """Number of steps of system G, which has published losses at 1000 and 2000 of 5000 steps.

    1000 steps take two CPU cores a quarter of an hour.
    """
    again: bool = False
    """Train systems again that have a record."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; `auto` takes CUDA if torch sees it, else the CPU."""
    runs: Path = Path("runs/reproduce")
    """Folder of the runs."""
    render: bool = False
    """Write the page from the records there are, without training."""
    out: Path | None = None
    """Folder of the records; by default bench/results/local/<device>."""
    publish: bool = False
    """Move the local records beside the committed ones and write docs/reproduction.md."""

    def __post_init__(self) -> None:
        if self.gpt_steps < 1:
            raise UserError(f"--gpt-steps is {self.gpt_steps}: expected 1 or more")


def chosen(only: tuple[str, ...]) -> list[System]:
    """Returns the systems of these letters or recipes, in the order of the lecture."""
    known = {name: s for s in SYSTEMS for name in (s.letter, s.recipe)}
    for name in only:
        if name not in known:
            raise unknown_name("system", name, known)
    return [s for s in SYSTEMS if (s.letter in only or s.recipe in only if only else s.on_cpu)]


def commands(system: System, options: Reproduce) -> list[list[str]]:
    """Returns the arguments of `python train.py` for each run, except the run directory."""
    shorter = ["--steps", str(options.gpt_steps)] if system.letter == "G" else []
    on = ["--train.device", device.pick_device(options.device, "--device")]
    return [[system.recipe, *shorter, *on, "--seed", str(seed)] for seed in system.seeds]


def settings(config: Config) -> dict[str, Any]:
    """Returns the settings that decide a run's losses: all but the samples' own."""
    found = json.loads(to_json(config))
    del found["train"]["sample_tokens"]
    return found


def all_runs() -> list[dict[str, Any]]:
    """Reads the records of every run, local or committed, with the settings that each `means` now.

    An option that is newer than the record had its default then; one that is gone means no run.
    """
    found = []
    for row in (*records.read(), *records.read(records.RESULTS / records.LOCAL)):
        if row["kind"] == NAME:
            with suppress(KeyError, TypeError, UserError):
                found.append({**row, "means": _anywhere(from_json(json.dumps(row["config"])))})
    return found


def _anywhere(config: Config) -> dict[str, Any]:
    """Returns the settings, the same for any device: on a CPU, residual `auto` is fp32."""
    residual = {"auto": "fp32"}.get(config.train.residual, config.train.residual)
    train = replace(config.train, device="auto", residual=residual)
    return settings(replace(config, train=train))


def on_record(
    config: Config, rows: list[dict[str, Any]], device: str = ""
) -> dict[str, Any] | None:
    """Finds the newest of the runs with these settings, on a device if one is given."""
    expected = _anywhere(config)
    same = (row for row in rows if row["means"] == expected and device in ("", row["device"]))
    return max(same, key=lambda row: row["run"], default=None)  # a run's name begins with its time


def train(argv: list[str], run_dir: Path) -> float:
    """Trains; returns the seconds of the whole process and of earlier interrupted ones.

    Raises:
        UserError: the run failed; its own message is on the terminal.
    """
    clock = run_dir.with_suffix(".seconds")
    before = float(clock.read_text()) if clock.exists() else 0.0
    command = [sys.executable, "train.py", *argv, "--run-dir", str(run_dir), "--resume", "auto"]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT)
    finally:
        seconds = before + time.perf_counter() - start
        with writing(clock):
            clock.parent.mkdir(parents=True, exist_ok=True)
            clock.write_text(f"{seconds}")
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed; its message is above")
    return seconds


def reproduce(system: System, argv: list[str], options: Reproduce) -> dict[str, Any]:
    """Trains one run of a system; returns its row for the record."""
    config = configure(argv)
    key = hashlib.sha256(to_json(config).encode()).hexdigest()[:8]
    run_dir = options.runs.absolute() / f"{system.recipe}-{key}"
    seconds = train(argv, run_dir)
    log = read_records(run_dir / "metrics.jsonl")
    if log[-1]["step"] < config.steps:
        raise UserError(f"{run_dir} stopped at step {log[-1]['step']}; the same command resumes it")
    measured = {
        f"{target.key} {target.step}": value
        for target in system.targets
        if (value := _value(log, target.key, target.step)) is not None
    }
    manifest = json.loads((run_dir / "manifest.json").read_text())
    return {
        "system": system.letter,
        "command": f"python train.py {' '.join(argv)}",
        "seconds": round(seconds, 1),
        "parameters": manifest["parameters"],
        "measured": measured,
        "config": settings(config),
    }


def _value(log: list[dict[str, Any]], key: str, step: int) -> float | None:
    return next((r[key] for r in log if r["step"] == step and key in r), None)


# --- the page -------------------------------------------------------------------------------------


def write_page(options: Reproduce, path: Path) -> None:
    """Writes to `path` the text of `docs/reproduction.md` with a table of the newest records."""
    page = put_into(PAGE.read_text(encoding="utf-8"), render(recorded(options)))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode())


def recorded(options: Reproduce) -> dict[str, list[dict[str, Any]]]:
    """Returns the newest record of each run by system, on any device."""
    runs, known = {}, all_runs()
    for system in SYSTEMS:
        config = configure(commands(system, options)[0])
        rows = [on_record(replace(config, seed=seed), known) for seed in system.seeds]
        runs[system.letter] = [row for row in rows if row is not None]
    return runs


def put_into(page: str, table: str) -> str:
    """Returns `page` with `table` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UserError(f"the page lacks the marks {BEGIN} and {END}: put them back")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def render(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Formats the table from the records of each system; systems without a record are marked."""
    columns = ("system", "step", "published", "measured", "band", "inside", "seconds", "command")
    rows = [row for rows in runs.values() for row in rows]
    lines = [*_machines(rows), f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    notes: list[str] = []
    for system in SYSTEMS:
        lines += _lines(system, runs.get(system.letter, []), notes)
    lines += ["", *notes]
    if rows:
        minutes = sum(row["seconds"] for row in rows) / 60
        lines += ["", f"All runs together took {minutes:.1f} minutes, start-up included."]
    return "\n".join(lines) + "\n"


def _machines(rows: list[dict[str, Any]]) -> list[str]:
    found = {
        f"Measured on {row['device']}; PyTorch {row['versions']['torch']}, commit {row['commit']}."
        for row in rows
    }
    return [*sorted(found), ""] if found else []


def _lines(system: System, rows: list[dict[str, Any]], notes: list[str]) -> Iterator[str]:
    """Yields a line for each target."""
    name = f"{system.letter}: {system.about}"
    seconds = " + ".join(f"{row['seconds']:.0f}" for row in rows) or "-"
    command = f"`{rows[0]['command']}`" if rows else f"`python train.py {system.recipe}`"
    for target in system.targets:
        published, band = f"{target.published:.4f}".rstrip("0"), f"±{target.band}"
        if target.note:
            notes.append(f"{len(notes) + 1}. {target.note}")
            published += f" ({len(notes)})"
        key = f"{target.key} {target.step}"
        found = [row["measured"][key] for row in rows if key in row["measured"]]
        measured, inside = _judged(target, found)
        if rows and not found:
            measured = f"{rows[0]['config']['steps']:,} steps run so far"
        cells = (name, f"{target.step:,}", published, measured, band, inside, seconds, command)
        yield f"| {' | '.join(cells)} |"


def _judged(target: Target, found: list[float]) -> tuple[str, str]:
    """Formats the mean, with the range of several runs, and whether it is within the band."""
    if not found:
        return "not run yet", "-"
    mean = statistics.fmean(found)
    inside = "yes" if abs(mean - target.published) <= target.band else "**no**"
    if len(found) == 1:
        return f"{mean:.4f}", inside
    return f"{mean:.4f} ({min(found):.4f} to {max(found):.4f})", inside


def main(argv: list[str]) -> None:
    options = flags.command(Reproduce, argv, prog="python -m bench.reproduce")
    console, on = Console(highlight=False), device.pick_device(options.device, "--device")
    name = records.described(on)["device"]
    page = records.RESULTS / records.LOCAL / PAGE.name
    write_page(options, page)  # shows a problem before hours of training
    for system in chosen(options.only) if not options.render else ():
        for argv in commands(system, options):
            if options.again or on_record(configure(argv), all_runs(), name) is None:
                console.rule(f"{system.letter}: {' '.join(argv)}")
                records.Writer(on, options.out).write(NAME, reproduce(system, argv, options))
                write_page(options, page)
    if options.publish:
        records.publish()
        write_page(options, page := PAGE)
    console.print(f"wrote {page}", soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
