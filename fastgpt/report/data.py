"""Figures, samples and settings of a run for a report, read while the run may still write them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastgpt.config.config import Config
from fastgpt.convert.saved import saved_config
from fastgpt.errors import UserError, counted, reason
from fastgpt.files import parse_json
from fastgpt.logs.metrics import comparable, is_whole, read_records
from fastgpt.run.directory import is_run

SAMPLES, SAMPLE_LENGTH = 24, 4000
RISEN = 0.01
"""Share of the validation loss by which it must have risen to be called overfitting."""
LOGGED = ("step", "tokens", "epoch", "train_loss", "val_loss", "val_tokens", "val_bits_per_byte",
          "lr", "muon_lr", "grad_norm", "tok_per_s", "mfu", "peak_memory_gib")  # fmt: skip
Columns = dict[str, np.ndarray]
"""Figures by name, each (records,) float64, NaN where a record has none."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder describes it; what cannot be read is empty, and has a note."""

    path: Path
    label: str
    config: Config
    manifest: dict[str, Any]
    trained: Columns
    """Columns of the logged steps, with smoothed losses and the minutes before each."""
    evaluated: Columns
    """Columns of the evaluations; `compared` has the losses that can be compared."""
    samples: list[tuple[int, str]]
    """Steps in order, and the text of each."""
    notes: list[str]

    @property
    def best(self) -> int:
        """Place of the lowest validation loss that can be compared; after all if there is none."""
        return int(np.nan_to_num([*self.evaluated["compared"], np.inf], nan=np.inf).argmin())

    @property
    def checkpoint(self) -> Path:
        """Checkpoint of the lowest validation loss, or where there is none the run itself."""
        best = self.path / "checkpoints" / "best"
        return best if best.is_dir() else self.path

    @property
    def last_step(self) -> int:
        return int(max(x["step"].max(initial=0) for x in (self.trained, self.evaluated)))


def read_run(path: Path, label: str) -> Run:
    """Reads a run, but no checkpoint of it.

    Raises:
        UserError: `path` is not a run, or its config.json cannot be read.
    """
    if not is_run(path):
        what = "is not a run" if path.exists() else "does not exist"
        raise UserError(f"RUN {path} {what}: expected the folder of a run, such as runs/NAME")
    notes, manifest, of_step = list[str](), dict[str, Any](), dict[int, dict[str, Any]]()
    for record in filter(is_whole, read_records(path / "metrics.jsonl")):
        of_step.setdefault(record["step"], {}).update(record)  # an evaluation has one of its own
    trained, evaluated = _figures([of_step[step] for step in sorted(of_step)])
    try:
        manifest |= parse_json((path / "manifest.json").read_text(errors="replace"))
    except (OSError, ValueError, TypeError) as error:
        notes.append(f"manifest.json cannot be read ({reason(error)}): the machine is unknown.")
    samples = _samples(path / "samples.txt", {*evaluated["step"]})
    run = Run(path=path, label=label, config=saved_config(path), manifest=manifest, notes=notes,
              trained=trained, evaluated=evaluated, samples=samples)  # fmt: skip
    if run.last_step < run.config.steps:
        progress = f"{run.last_step:,} of {run.config.steps:,} steps"
        notes.append(f"The run has logged {progress}: it is still training, or was stopped.")
    losses = trained["train_loss"]
    if broken := trained["step"][~np.isfinite(losses)].tolist():
        some = f"{len(broken):,} of {len(losses):,} logged training losses are not finite"
        notes.append(f"{some}, the first one at step {broken[0]:,.0f}: no curve shows them.")
    if not samples:
        notes.append("There are no samples: a run makes them with its evaluations.")
    return run


def _figures(records: list[dict[str, Any]]) -> tuple[Columns, Columns]:
    """Returns what `Run` has of the steps that were logged, and of the evaluations."""
    trained = _columns([record for record in records if "train_loss" in record])
    known, trained["smoothed"] = np.isfinite(trained["train_loss"]), trained["step"] * np.nan
    losses = trained["train_loss"][known]
    if len(losses):  # means over a twentieth of the log, less at the ends
        width = np.ones(1 + 2 * (len(losses) // 40))
        sums, counts = (np.convolve(x, width, "same") for x in (losses, np.ones(len(losses))))
        trained["smoothed"][known] = sums / counts
    timed = trained["tok_per_s"] > 0
    ends = np.maximum.accumulate([0.0, *trained["tokens"][timed]])
    spent = [0.0, *np.cumsum(np.diff(ends) / trained["tok_per_s"][timed]) / 60]
    evaluated = _columns([record for record in records if "val_loss" in record])
    for columns in (trained, evaluated):
        columns["minutes"] = np.interp(columns["tokens"], ends, spent)
    losses = {record["step"]: record["val_loss"] for record in comparable(records)}
    compared = [losses.get(step, np.nan) for step in evaluated["step"]]
    evaluated["compared"] = np.where(np.isfinite(compared), compared, np.nan)
    return trained, evaluated


def _columns(records: list[dict[str, Any]]) -> Columns:
    known = [{k: x for k, x in r.items() if isinstance(x, int | float)} for r in records]
    return {name: np.array([r.get(name, np.nan) for r in known], float) for name in LOGGED}


def _samples(path: Path, steps: set[float]) -> list[tuple[int, str]]:
    """Reads samples.txt: the last text of each of these steps; others were abandoned."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    _, *parts = re.split(r"^=== step (\d{1,15}) ===\n", text, flags=re.M)
    found = {int(step): said[:SAMPLE_LENGTH] for step, said in zip(parts[::2], parts[1::2])}
    return evenly(sorted(pair for pair in found.items() if pair[0] in steps), SAMPLES)


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Returns at most `most` items at even distances, with the first and the last."""
    places = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[place] for place in places]


def finding(run: Run) -> str:
    """Says in words how the validation loss went, and since when the model has overfitted."""
    losses, compared = run.evaluated["val_loss"], run.evaluated["compared"]
    at, differing, other = np.isfinite(compared), np.isfinite(losses) & (losses != compared), ""
    step, loss, size = (run.evaluated[name][at] for name in ("step", "compared", "val_tokens"))
    if at.any() and differing.any():
        names = ("step", "val_tokens", "val_loss")
        when, used, alone = (run.evaluated[name][differing][-1] for name in names)
        other = f" At step {when:,.0f} the loss over {used:,.0f} tokens was {alone:.4f},"
        other += f" not comparable with those over {size[0]:,.0f}."
    if len(loss) < 3:
        few = counted(len(loss), "comparable evaluation")
        return f"{few} of the validation loss: too few to tell whether the model overfits.{other}"
    best = int(loss.argmin())
    said = f"The validation loss was lowest at step {step[best]:,.0f}: {loss[best]:.4f}"
    if best == len(loss) - 1:
        return f"{said}, the last of its kind. It did not rise.{other}"
    said += f"; at step {step[-1]:,.0f} it was {loss[-1]:.4f}"
    if loss[-1] > loss[best] * (1 + RISEN):
        note = "; the weights of then are in checkpoints/best" * (run.checkpoint.name == "best")
        return f"{said}. The model has overfitted since step {step[best]:,.0f}{note}.{other}"
    return f"{said}, about the same: no clear sign of overfitting.{other}"
