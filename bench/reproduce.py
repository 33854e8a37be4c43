"""Trains every system of the lecture as published: `python -m bench.reproduce [--only A B]`.

Each system is one `python train.py RECIPE`. Its losses are recorded, and a table is written from
all records: into bench/results/local, or with `--publish` into docs/reproduction.md. A system that
has a record is not trained again, and an interrupted run is resumed.
"""

import hashlib
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from bench import records, report
from bench.measure import ROOT, quantiles
from fastgpt import flags
from fastgpt.cli import configure
from fastgpt.config.config import Config, to_json
from fastgpt.convert.saved import from_json
from fastgpt.device import device
from fastgpt.errors import UserError, run_command
from fastgpt.logs.metrics import read_records

PAGE = report.DOCS / "reproduction.md"
RUNS = ROOT / "runs" / "reproduce"
MEASURED = "Measured on {device}; PyTorch {versions[torch]}, commit {commit}."
Letter = Literal["A", "B", "C", "D", "E", "F", "H", "G", "G'"]


class Target(NamedTuple):
    """A published loss, in nats for each token."""

    step: int
    published: float
    band: float = 0.05  # other random numbers change each loss by a few hundredths
    key: str = "val_loss"  # a mean over 200 random batches; or train_loss, of one
    note: str = ""


class System(NamedTuple):
    """A step of the lecture: a model with its published losses."""

    letter: str
    recipe: str
    about: str
    targets: tuple[Target, ...]
    seeds: tuple[int, ...] = (1337, 1, 2)  # of a run each; the mean of their losses counts


SYSTEMS = (
    System("A", "lecture-bigram", "a bigram model", (
        Target(10_100, 2.49, note="the published text has no validation loss; 2.49 is what other"
               " people's runs of these settings gave"),
        # single batches scatter by 0.07
        Target(10_100, 2.45, band=0.15, key="train_loss", note="training loss of one batch"),
    )),
    System("B", "lecture-head", "one attention head", (Target(1000, 2.5303), Target(4500, 2.4084))),
    System("C", "lecture-multihead", "four heads", (Target(4500, 2.2858),)),
    System("D", "lecture-feedforward", "four heads and a feed-forward layer",
           (Target(4500, 2.2411),)),
    System("E", "lecture-residual", "three blocks with residual connections",
           (Target(4500, 2.1174),)),
    System("F", "lecture-layernorm", "three blocks with LayerNorm", (Target(4500, 2.0819),)),
    System("H", "lecture-gpt-small", "a GPT, 4 layers of width 64",
           (Target(5000, 1.82, note="from the lecture's own run"),), seeds=(1337,)),
    System("G", "lecture-gpt", "a GPT, 6 layers of width 192, dropout",
           (Target(1000, 1.7604), Target(2000, 1.5939)), seeds=(1337,)),
    System("G'", "lecture-gpt-full", "like G with width 384, context 256",
           (Target(5000, 1.48, note="reported elsewhere, not in the published text"),), (1337,)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduce:
    """Trains the systems of the lecture and compares their losses with the published ones."""

    only: tuple[Letter, ...] = get_args(Letter)[:-1]
    """Systems to train; by default all except G', which needs a GPU."""
    gpt_steps: int = 1000
    """Number of steps of system G, published at 1000 (a quarter of an hour on a CPU) and 2000."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; `auto` takes CUDA if torch sees it, else the CPU."""
    render: bool = False
    """Write the page from the records there are, without training."""
    out: Path | None = None
    """Folder of the records; by default bench/results/local."""
    publish: bool = False
    """Move the local records beside the committed ones and write docs/reproduction.md."""


def comparable(config: Config) -> Config:
    """Returns the settings that decide the losses up to a step, on any device."""
    residual = {"auto": "fp32"}.get(config.train.residual, config.train.residual)  # as on a CPU
    train = replace(config.train, device="auto", residual=residual, sample_tokens=0)
    return replace(config, steps=1, train=train)


def on_record(config: Config) -> list[records.Record]:
    """Returns the runs with these settings to any step, the longest and newest last.

    An option that is newer than a record had its default then; one that is gone means no run.
    """
    wanted, mine, found = comparable(config), f"reproduce/{config.recipe}/", list[records.Record]()
    for row in (*records.read(), *records.read(records.RESULTS / records.LOCAL)):
        with suppress(KeyError, TypeError, UserError):
            if mine in row["case"] and comparable(from_json(json.dumps(row["config"]))) == wanted:
                found.append(row)
    return sorted(found, key=lambda row: (row["config"]["steps"], row["run"]))


def train(system: System, argv: list[str]) -> records.Record:
    """Trains or resumes a run; returns its record, with the seconds of its last process."""
    config = configure(argv)
    key = hashlib.sha256(to_json(config).encode()).hexdigest()[:8]
    run_dir = RUNS / f"{system.recipe}-{key}"
    command = [sys.executable, "train.py", *argv, "--run-dir", str(run_dir), "--resume", "auto"]
    resumed, start = run_dir.exists(), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT)
    seconds = quantiles([round(time.perf_counter() - start, 1)])
    log = read_records(run_dir / "metrics.jsonl")
    if done.returncode or log[-1]["step"] < config.steps:
        raise UserError(f"{' '.join(command)} failed or was stopped; bench.reproduce resumes it")
    measured = {
        f"{target.key} {target.step}": row[target.key]
        for target in system.targets
        for row in log
        if row["step"] == target.step and target.key in row
    }
    return records.record(
        f"reproduce/{system.recipe}/steps={config.steps}/seed={config.seed}", "fastgpt",
        seconds, resumed=resumed, measured=measured,
        command=f"python train.py {' '.join(argv)}", config=json.loads(to_json(config)),
    )  # fmt: skip


def judged(target: Target, rows: list[records.Record]) -> tuple[str, str, str]:
    """Formats the mean of the runs and their range, the band, and whether the mean is inside."""
    key, band = f"{target.key} {target.step}", f"±{target.band}"
    found = [row["measured"][key] for row in rows if key in row["measured"]]
    if not found:
        said = f"{rows[0]['config']['steps']:,} steps run so far" if rows else "not run yet"
        return said, band, "-"
    mean = sum(found) / len(found)
    scatter = f" ({min(found):.4f} to {max(found):.4f})" * (len(found) > 1)
    inside = abs(mean - target.published) <= target.band
    return f"{mean:.4f}{scatter}", band, "yes" if inside else "**no**"


def render() -> str:
    """Formats the table of the longest run of each system and seed, on any device."""
    lines, notes, machines, total = list[tuple[str, ...]](), list[str](), set[str](), 0.0
    for system in SYSTEMS:
        configs = [configure([system.recipe, "--seed", str(seed)]) for seed in system.seeds]
        rows = [row for config in configs for row in on_record(config)[-1:]]
        machines |= {MEASURED.format_map(row) for row in rows}
        taken = [row["figure"]["p50"] for row in rows if not row.get("resumed")]
        total += sum(taken)
        name, seconds = f"{system.letter}: {system.about}", " + ".join(f"{s:.0f}" for s in taken)
        command = rows[0]["command"] if rows else f"python train.py {system.recipe}"
        for target in system.targets:
            published = f"{target.published:.4f}".rstrip("0")
            if target.note:
                notes.append(f"{len(notes) + 1}. {target.note}")
                published += f" ({len(notes)})"
            cells = name, f"{target.step:,}", published, *judged(target, rows)
            lines.append((*cells, seconds or "-", f"`{command}`"))
    table = report.table("system|step|published|measured|band|inside|seconds|command", lines)
    took = f"All runs together took {total / 60:.1f} minutes, start-up included.\n"
    return "\n".join((*sorted(machines), "", table, *notes, "", took))


def main(argv: list[str]) -> None:
    options = flags.command(Reproduce, argv, prog="python -m bench.reproduce")
    on = device.pick_device(options.device, "--device")
    here, page = records.described(on)["device"], records.RESULTS / records.LOCAL / PAGE.name
    report.put_into(PAGE, render(), page)  # shows a problem before hours of training
    runs = []
    for system in SYSTEMS if not options.render else ():
        steps = ["--steps", str(options.gpt_steps)] if system.letter == "G" else []
        for seed in system.seeds if system.letter in options.only else ():
            words = [system.recipe, *steps, "--train.device", on, "--seed", str(seed)]
            runs.append((system, words, configure(words)))
    for system, words, config in runs:
        known = [row["config"]["steps"] for row in on_record(config) if row["device"] == here]
        if max(known, default=0) < config.steps:
            print(f"{system.letter}: {' '.join(words)}", flush=True)
            records.Writer(on, options.out).write(train(system, words))
            report.put_into(PAGE, render(), page)
    if options.publish:
        report.publish()
        report.put_into(PAGE, render(), page := PAGE)
    print(f"wrote {page}")


if __name__ == "__main__":
    run_command(main)
