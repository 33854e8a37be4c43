"""Figures, samples and settings of a run for a report, read while the run may still write them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastgpt.config.config import Config
from fastgpt.convert.saved import saved_config
from fastgpt.errors import UserError, reason
from fastgpt.files import parse_json
from fastgpt.logs.metrics import comparable, is_whole, read_records
from fastgpt.run.directory import is_run

POINTS = 2000
SAMPLES, SAMPLE_LENGTH = 24, 4000
LOGGED = ("step", "tokens", "epoch", "train_loss", "val_loss", "val_tokens", "val_bits_per_byte",
          "lr", "grad_norm", "tok_per_s", "mfu", "peak_memory_gib")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder describes it; what cannot be read is empty, and has a note."""

    path: Path
    label: str
    config: Config
    manifest: dict[str, Any]
    columns: dict[str, np.ndarray]
    """Figures by name, each (steps logged,) float64, NaN where a step has none."""
    samples: list[tuple[int, str]]
    """Steps in order, and the text of each."""
    notes: list[str]

    def finite(self, name: str) -> np.ndarray:
        """Returns the finite values of a figure, in order."""
        return self.columns[name][np.isfinite(self.columns[name])]

    def median(self, name: str) -> float:
        return float(np.median(self.finite(name))) if len(self.finite(name)) else np.nan

    @property
    def best(self) -> int:
        """Place of the lowest validation loss that can be compared in the columns."""
        return int(np.nan_to_num(self.columns["compared"], nan=np.inf).argmin())

    @property
    def checkpoint(self) -> Path:
        """Checkpoint of the lowest validation loss, or where there is none the run itself."""
        best = self.path / "checkpoints" / "best"
        return best if best.is_dir() else self.path

    @property
    def last_step(self) -> int:
        return int(self.columns["step"].max(initial=0))


def read_run(path: Path, label: str) -> Run:
    """Reads a run, but no checkpoint of it.

    Raises:
        UserError: `path` is not a run, or its config.json cannot be read.
    """
    if not is_run(path):
        what = "is not a run" if path.exists() else "does not exist"
        raise UserError(f"RUN {path} {what}: expected the folder of a run, such as runs/NAME")
    config, notes, manifest = saved_config(path), list[str](), {}
    records = _records(path / "metrics.jsonl")
    columns = _columns(records)
    evaluated = set(columns["step"][np.isfinite(columns["val_loss"])].tolist())
    samples = _samples(path / "samples.txt", evaluated)
    try:
        manifest = dict(parse_json((path / "manifest.json").read_text(errors="replace")))
    except (OSError, ValueError, TypeError) as error:
        notes.append(f"manifest.json cannot be read ({reason(error)}): the machine is unknown.")
    run = Run(path=path, label=label, config=config, manifest=manifest, columns=columns,
              samples=samples, notes=notes)  # fmt: skip
    if run.last_step < config.steps:
        progress = f"{run.last_step:,} of {config.steps:,} steps"
        notes.append(f"The run has logged {progress}: it is still training, or was stopped.")
    losses = {r["step"]: r["train_loss"] for r in records if "train_loss" in r}
    broken = [step for step, loss in losses.items() if loss is None or not np.isfinite(loss)]
    if broken:
        some = f"{len(broken):,} of {len(losses):,} logged training losses are not finite"
        notes.append(f"{some}, the first one at step {broken[0]:,}: no curve shows them.")
    if not samples:
        notes.append("There are no samples: a run makes them with its evaluations.")
    return run


def _records(path: Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl: one record for each step, in order."""
    of_step = dict[int, dict[str, Any]]()
    for record in filter(is_whole, read_records(path)):  # an evaluation has one of its own
        of_step.setdefault(record["step"], {}).update(record)
    return [of_step[step] for step in sorted(of_step)]


def _columns(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns the figures, `compared` validation losses, `smoothed` losses, and the `seconds`."""
    columns = dict[str, np.ndarray]()
    for name in LOGGED:
        values = [record.get(name) for record in records]
        columns[name] = np.array(
            [x if isinstance(x, int | float) else np.nan for x in values], float
        )
    val_losses = {record["step"]: record["val_loss"] for record in comparable(records)}
    columns["compared"] = np.array([val_losses.get(r["step"], np.nan) for r in records], float)
    columns["compared"][~np.isfinite(columns["val_loss"])] = np.nan
    logged, columns["smoothed"] = np.isfinite(columns["train_loss"]), columns["step"] * np.nan
    if logged.any():
        columns["smoothed"][logged] = _smoothed(columns["train_loss"][logged])
    timed = columns["tok_per_s"] > 0
    ends = np.concatenate([[0.0], np.maximum.accumulate(columns["tokens"][timed])])
    spent = np.cumsum(np.diff(ends) / columns["tok_per_s"][timed])
    columns["seconds"] = np.interp(columns["tokens"], ends, [0.0, *spent])
    return columns


def _smoothed(losses: np.ndarray) -> np.ndarray:
    """Computes centered moving averages of losses (N,), over a twentieth, less at the ends."""
    place = np.arange(len(losses))
    half = np.minimum(len(losses) // 40, np.minimum(place, place[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    return (sums[place + half + 1] - sums[place - half]) / (2 * half + 1)


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


def thinned(values: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Returns the indices of the finite values (N,), or of `most` of them and the two ends.

    Each of `most` / 2 bins of consecutive values keeps its lowest and its highest, so that no
    spike is lost.
    """
    known = np.flatnonzero(np.isfinite(values))
    if len(known) <= most:
        return known
    bins = np.array_split(known, most // 2)
    extremes = [part[at(values[part])] for part in bins for at in (np.argmin, np.argmax)]
    return np.unique([known[0], *extremes, known[-1]])
