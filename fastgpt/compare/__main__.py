"""`python -m fastgpt.compare A B`: what differs between two runs, and from which tensor on."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

from fastgpt import flags
from fastgpt.checkpoint import checkpoint
from fastgpt.config.config import saved_config
from fastgpt.errors import UserError, run_command
from fastgpt.files import parse_json
from fastgpt.logs.metrics import read_records
from fastgpt.run.directory import is_run
from fastgpt.terminal import print_line, print_text

MANIFEST = (
    *("commit", "versions", "device", "on", "ranks", "precision", "compile", "micro_batch", "ops"),
    *("data", "parameters", "started_from"),
)
HARMLESS = re.compile(
    r"recipe|run_dir|resume|(log|eval|save)_.*|train\.(keep|resume|stall|sample|eval)_.*"
    r"|data\.(source|name|python|(final_)?eval_.*)|versions\.python"
)
"""Names of what changes no weight; the text that `data.source` names has a digest."""
Row = tuple[str, str, Any, Any, bool]
"""Section, name, value in A and B (None: not recorded), and True if results may depend on it."""


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


class Run:
    """A run as its folder records it, or the run of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.checkpoints, found, folder, manifest = {}, [path], path, {}
        if checkpoint.is_checkpoint(path):
            folder = run if is_run(run := path.absolute().parents[1]) else path
        elif is_run(path):
            self.checkpoints[0] = None  # untrained weights
            saved = path / "checkpoints"
            found = [*saved.glob("best"), *checkpoint.steps_on_disk(saved)]
        else:
            what = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}: expected the path of a run or checkpoint")
        self.checkpoints |= {checkpoint.read_record(x)["step"]: str(x) for x in found}
        self.config = saved_config(folder)
        with suppress(OSError, ValueError, TypeError, AttributeError):  # missing or damaged
            manifest = parse_json((folder / "manifest.json").read_text())
            for resumed in manifest.get("resumes", []):
                manifest |= resumed
        self.facts = {"settings": _flat(asdict(self.config))}
        self.facts["manifest"] = _flat({name: manifest.get(name) for name in MANIFEST})
        self.records = [r for r in read_records(folder / "metrics.jsonl") if "step" in r]

    def logged(self, key: str) -> dict[int, float]:
        return {r["step"]: r[key] for r in self.records if r.get(key) is not None}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, x in values.items():
        flat |= {f"{name}.{k}": v for k, v in x.items()} if isinstance(x, dict) else {name: x}
    return flat


def rows(a: Run, b: Run) -> Iterator[Row]:
    """Yields each fact that both runs have recorded, whether it differs or not."""
    for section, one in a.facts.items():
        for name in one | (two := b.facts[section]):
            yield section, name, one.get(name), two.get(name), not HARMLESS.fullmatch(name)
    for step in sorted(a.checkpoints.keys() & b.checkpoints.keys() - {0}):
        files = (checkpoint.read_record(Path(x.checkpoints[step]))["sha256"] for x in (a, b))
        one, two = (str(x.get("model.safetensors"))[:16] for x in files)
        yield "weights", f"sha256 at step {step}", one, two, True
    one, two = a.logged("train_loss"), b.logged("train_loss")
    common = sorted(one.keys() & two.keys())
    apart = [step for step in common if one[step] != two[step]]
    most = sorted(apart, key=lambda step: abs(one[step] - two[step]))
    named = {"first to differ": apart[:1], "differs most": most[-1:], "last": common[-1:]}
    for why, steps in named.items():
        for step in steps:
            yield "losses", f"training, step {step} ({why})", one[step], two[step], True


def summary(a: Run, b: Run) -> Iterator[Row]:
    """Yields validation losses and speeds of runs."""
    one, two = a.logged("val_loss"), b.logged("val_loss")
    if one and two:
        alike = a.config.data == b.config.data  # else they may be of other tokens
        yield "losses", "validation, final", one[max(one)], two[max(two)], alike
        yield "losses", "validation, best", min(one.values()), min(two.values()), False
    one, two = (run.logged("tok_per_s").values() for run in (a, b))
    if one and two:
        yield "speed", "tokens/s, median", median(one), median(two), False
        yield "speed", "ratio", 1.0, round(median(two) / median(one), 3), False


def main(argv: list[str]) -> int:
    """Runs the command line `argv`, and returns the exit status."""
    asked = flags.parse(Arguments, argv, prog="python -m fastgpt.compare")
    a, b = (Run(path.expanduser()) for path in asked.runs)
    every, found = [*rows(a, b), *summary(a, b)], None
    differs = any(one != two and decides for _, _, one, two, decides in every)
    shown = [row[:4] for row in every if row[2] != row[3] or row[0] in ("losses", "speed")]
    cells = [[*map(str, row)] for row in (("", "", "A", "B"), *shown)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    said = ["  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in cells]
    said.append("the runs differ" if differs else "nothing that decides the result differs")
    if asked.diverge:
        from fastgpt.compare.diverge import diverge  # slow to import

        common = a.checkpoints.keys() & b.checkpoints.keys()
        start = max(common, default=0) if asked.start is None else asked.start
        if start not in common:
            had = f"{sorted(a.checkpoints)} and {sorted(b.checkpoints)}"
            raise UserError(f"--start is {start}: expected a step of both runs, which have {had}")
        one, two = (replace(run.config, resume=run.checkpoints[start]) for run in (a, b))
        found = diverge(one, two, asked.steps, asked.bound, print_line)
        said.append(f"no tensor differs in {asked.steps} steps after step {start}")
        if found:
            when = "in" if found["step"] > start else "at the start, after"
            said[-1] = " ".join(str(x) for x in (f"first {when} step", *found.values()) if x != "")
    facts = [dict(zip(("section", "name", "a", "b", "decides"), row)) for row in every]
    answer = {"differs": differs, "facts": facts, "diverges": found}
    print_text(json.dumps(answer, indent=1, default=str) if asked.json else "\n".join(said))
    return int(differs or found is not None)


if __name__ == "__main__":
    run_command(main, error_status=2)
