"""`python -m fastgpt.compare A B`: what differs between two runs."""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

from fastgpt import flags
from fastgpt.checkpoint import checkpoint
from fastgpt.config.config import flat
from fastgpt.convert.saved import saved_config
from fastgpt.errors import UserError, run_command
from fastgpt.files import parse_json
from fastgpt.logs.metrics import comparable, is_whole, read_records
from fastgpt.run.directory import is_run
from fastgpt.terminal import print_text, table

MANIFEST = (
    *("commit", "versions", "device", "on", "ranks", "precision", "compile", "micro_batch", "ops"),
    *("data", "parameters", "started_from"),
)
HARMLESS = re.compile(
    r"settings\.(recipe|run_dir|resume|track|(log|eval|save)_.*|train\.(keep|sample)_.*"
    r"|data\.(source|(final_)?eval_.*))|data\.(name|python)|versions\.python|(validation|speed).*"
)
"""Names of what changes no weight; the text that `data.source` names has a digest."""
TEXT = ("data.sha256", "data.tokenizer", "data.weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Shows what differs between two runs. Exit status: 0 if no result can differ, else 1."""

    runs: Annotated[tuple[Path, Path], tyro.conf.Positional]
    """Folders of the runs A and B, or checkpoints in them."""
    json: bool = False
    """Print JSON, with what is equal, too."""


class ComparedRun:
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
        known = {name: manifest.get(name) for name in MANIFEST}
        self.facts = flat({"settings": asdict(self.config), **known})
        self.records = [*filter(is_whole, read_records(folder / "metrics.jsonl"))]

    def logged(self, key: str) -> dict[int, float]:
        return {r["step"]: r[key] for r in self.records if isinstance(r.get(key), float)}


def facts(a: ComparedRun, b: ComparedRun) -> dict[str, tuple[Any, Any]]:
    """Returns what the runs have recorded, as name -> values in A and B (None: not recorded)."""
    found = {name: (a.facts.get(name), b.facts.get(name)) for name in a.facts | b.facts}
    for step in sorted(a.checkpoints.keys() & b.checkpoints.keys() - {0}):
        files = (checkpoint.read_record(Path(x.checkpoints[step]))["sha256"] for x in (a, b))
        hashes = [str(x.get("model.safetensors"))[:16] for x in files]
        found[f"sha256 of the weights at step {step}"] = hashes[0], hashes[1]
    one, two = a.logged("train_loss"), b.logged("train_loss")
    common = sorted(one.keys() & two.keys())
    differing = [step for step in common if one[step] != two[step]]
    most = sorted(differing, key=lambda step: abs(one[step] - two[step]))
    named = {"first to differ": differing[:1], "differs most": most[-1:], "last": common[-1:]}
    for why, steps in named.items():
        found |= {f"training loss, step {i} ({why})": (one[i], two[i]) for i in steps}
    losses, speeds = ([run.logged(key) for run in (a, b)] for key in ("val_loss", "tok_per_s"))
    if all(losses):
        best = (min(r["val_loss"] for r in comparable(run.records)) for run in (a, b))
        found["validation loss, final"] = losses[0][max(losses[0])], losses[1][max(losses[1])]
        found["validation loss, best"] = next(best), next(best)
    if all(speeds):
        x, y = (median(values.values()) for values in speeds)
        found |= {"speed, tokens/s": (x, y), "speed, ratio": (1.0, round(y / x, 3))}
    return found


def differences(every: dict[str, tuple[Any, Any]]) -> str:
    """Returns a table of what differs, the losses and the speed."""
    rows, always = [("", "A", "B")], ("training", "validation", "speed")
    for name, values in every.items():
        if values[0] != values[1] or name.startswith(always):
            a, b = (re.sub(r"([0-9a-f]{16})[0-9a-f]{24,}", r"\1", str(x)) for x in values)
            rows.append((name, a, b))
    return table(rows)


def main(argv: list[str]) -> int:
    """Runs the command line `argv`, and returns the exit status."""
    asked = flags.command(Arguments, argv, prog="python -m fastgpt.compare")
    a, b = (ComparedRun(path.expanduser()) for path in asked.runs)
    every = facts(a, b)
    differs = any(x != y and not HARMLESS.fullmatch(name) for name, (x, y) in every.items())
    said = [differences(every)]
    if any(x != y and None not in (x, y) for name, (x, y) in every.items() if name in TEXT):
        said.append("the texts differ: their losses cannot be compared")
    said.append("the runs differ" if differs else "nothing that decides the result differs")
    answer = {"differs": differs, "facts": every}
    print_text(json.dumps(answer, indent=1, default=str) if asked.json else "\n".join(said))
    return int(differs)


if __name__ == "__main__":
    run_command(main, error_status=2)
