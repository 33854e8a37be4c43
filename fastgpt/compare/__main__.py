"""`python -m fastgpt.compare A B`: what differs between two runs, and from which tensor on."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import tyro

from fastgpt import flags
from fastgpt.checkpoint import checkpoint
from fastgpt.config.config import saved_config
from fastgpt.errors import UserError, run_command
from fastgpt.files import parse_json
from fastgpt.logs.metrics import read_records
from fastgpt.run.directory import is_run
from fastgpt.terminal import print_line, print_text

MANIFEST = {
    "code": ("commit", "versions"),
    "machine": ("device", "on", "ranks", "precision", "compile", "micro_batch", "ops"),
    "data": ("data", "parameters", "started_from"),
}
HARMLESS = """
    recipe run_dir resume log_every eval_every eval_epochs save_every train.keep_checkpoints
    train.keep_every train.resume_check train.stall_s train.sample_tokens train.sample_prompt
    train.eval_tasks data.source data.eval_tokens data.final_eval_tokens data.eval_batches
    versions.python data.python data.name"""
"""Facts that change no weight; the text that `data.source` names has a digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Shows what differs between two runs. Exit status: 0 if no result can differ, else 1."""

    runs: Annotated[tuple[Path, Path], tyro.conf.Positional]
    """Folders of the runs A and B, or checkpoints in them."""
    json: bool = False
    """Print JSON, with what is equal, too."""
    diverge: bool = False
    """Step both side by side, and name the first tensor that differs."""
    start: int | None = None
    """Step to begin at: one of which both have a checkpoint, or 0. By default it is the last."""
    steps: int = 100
    """Largest number of steps to take."""
    bound: float = 0.0
    """Largest absolute difference of two numbers that is none; at 0 they have the same bits."""


class Row(NamedTuple):
    """A fact about both runs; None: not recorded. If it `decides`, results may depend on it."""

    section: str
    name: str
    a: Any
    b: Any
    decides: bool = True


class Run:
    """A run as its folder records it, or the run of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.facts, self.checkpoints = {}, {}
        folder, found = path, [path]
        if checkpoint.is_checkpoint(path):
            folder = run if is_run(run := path.absolute().parents[1]) else path
        elif is_run(path):
            self.checkpoints[0] = None  # untrained weights
            found = [
                *path.glob("checkpoints/best"),
                *checkpoint.steps_on_disk(path / "checkpoints"),
            ]
        else:
            what = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}: expected the path of a run or checkpoint")
        self.checkpoints |= {checkpoint.read_record(x)["step"]: str(x) for x in found}
        self.config = saved_config(folder)
        with suppress(OSError, ValueError, TypeError, AttributeError):  # missing or damaged
            self.facts = parse_json((folder / "manifest.json").read_text())
            for resumed in self.facts.get("resumes", []):
                self.facts |= resumed
        self.records = [r for r in read_records(folder / "metrics.jsonl") if "step" in r]

    def logged(self, key: str) -> dict[int, float]:
        return {r["step"]: r[key] for r in self.records if r.get(key) is not None}


def rows(a: Run, b: Run) -> Iterator[Row]:
    """Yields each fact that both runs have recorded, whether it differs or not."""
    facts = {"settings": [asdict(run.config) for run in (a, b)]}
    for section, keys in MANIFEST.items():
        facts[section] = [{key: run.facts.get(key) for key in keys} for run in (a, b)]
    for section, found in facts.items():
        one, two = map(_flat, found)
        for name in one | two:
            yield Row(section, name, one.get(name), two.get(name), name not in HARMLESS.split())
    for step in sorted(a.checkpoints.keys() & b.checkpoints.keys() - {0}):
        files = [checkpoint.read_record(Path(x.checkpoints[step]))["sha256"] for x in (a, b)]
        yield Row("weights", f"step {step}", *(str(x.get("model.safetensors"))[:16] for x in files))


def curves(a: Run, b: Run) -> Iterator[Row]:
    """Yields losses and speed, of the losses those where they begin to differ, differ most, end."""
    one, two = a.logged("train_loss"), b.logged("train_loss")
    common = sorted(one.keys() & two.keys())
    apart = [step for step in common if one[step] != two[step]]
    most = sorted(apart, key=lambda step: abs(one[step] - two[step]))
    named = {"first difference": apart[:1], "largest difference": most[-1:], "last": common[-1:]}
    for why, steps in named.items():
        for step in steps:
            yield Row("losses", f"training, step {step}: {why}", one[step], two[step])
    losses, speeds = ([run.logged(key) for run in (a, b)] for key in ("val_loss", "tok_per_s"))
    if all(losses):
        alike = a.config.data == b.config.data  # else they may be of other tokens
        yield Row("losses", "validation, final", *(x[max(x)] for x in losses), alike)
        yield Row("losses", "validation, best", *(min(x.values()) for x in losses), False)
    if all(speeds):
        one, two = (median(x.values()) for x in speeds)
        yield Row("speed", "tokens/s, median", one, two, False)
        yield Row("speed", "ratio", 1.0, round(two / one, 3), False)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat = {name: x for name, x in values.items() if not isinstance(x, dict)}
    inside = ((name, x) for name, x in values.items() if isinstance(x, dict))
    return flat | {f"{name}.{inner}": x for name, entries in inside for inner, x in entries.items()}


def main(argv: list[str]) -> int:
    """Runs the command line `argv`, and returns the exit status."""
    asked = flags.parse(Arguments, argv, prog="python -m fastgpt.compare")
    a, b = (Run(path.expanduser()) for path in asked.runs)
    every, found = [*rows(a, b), *curves(a, b)], None
    differs = any(row.a != row.b and row.decides for row in every)
    shown = [row for row in every if row.a != row.b or row.section in ("losses", "speed")]
    cells = [("", "", "A", "B"), *(tuple(map(str, row[:4])) for row in shown)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    said = ["  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in cells]
    said.append("the runs differ" if differs else "nothing that decides the result differs")
    if asked.diverge:
        from fastgpt.compare.diverge import diverge  # slow to import

        common = sorted(a.checkpoints.keys() & b.checkpoints.keys())
        start = common[-1] if common and asked.start is None else asked.start
        if start not in common:
            had = f"{sorted(a.checkpoints)} and {sorted(b.checkpoints)}"
            raise UserError(f"--start is {start}: expected a step of both runs, which have {had}")
        configs = [replace(run.config, resume=run.checkpoints[start]) for run in (a, b)]
        found = diverge(*configs, asked.steps, asked.bound, print_line)
        said.append(f"no tensor differs in {asked.steps} steps after step {start}")
        if found:
            when = "at the start, step" if found["step"] == start else "in step"
            said[-1] = f"first {when} {{step}}: {{kind}} {{layer}} {{part}} {{how}}".format(**found)
    facts = {"differs": differs, "facts": [row._asdict() for row in every], "diverges": found}
    print_text(json.dumps(facts, indent=1, default=str) if asked.json else "\n".join(said))
    return int(differs or found is not None)


if __name__ == "__main__":
    run_command(main, error_status=2)
