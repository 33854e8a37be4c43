"""Metrics of a run, written to metrics.jsonl, TensorBoard events and loss.png."""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from fastgpt.display import duration
from fastgpt.errors import writing
from fastgpt.files import no_link, parse_json, write_atomically
from fastgpt.logs.writer import LogWriter

LOSSES = ("train_loss", "val_loss")


class MetricsLog:
    """Appends records to metrics.jsonl and TensorBoard events, and draws loss.png at the end.

    Args:
        from_step: step at which the run starts; later records in the file are dropped, because a
            resumed run writes them again.
        title: title of loss.png.
        warn: called with a warning if something cannot be written: training goes on.
    """

    def __init__(
        self, run_dir: Path, from_step: int, title: str, warn: Callable[[str], None] = print
    ) -> None:
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # slow to import: only the main rank needs it

        self.path, self.title = run_dir / "metrics.jsonl", title
        logged = [r for r in read_records(self.path) if _is_whole(r)]
        self.records = [r for r in logged if r["step"] <= from_step]
        kept = "".join(json.dumps(record) + "\n" for record in self.records)
        with writing(self.path):
            write_atomically(self.path, kept.encode())
            self._open()
            purge = from_step + 1 if from_step else None
            self.board = SummaryWriter(str(run_dir), purge_step=purge)
        self.torn = False
        """True if the last line of the file may be incomplete."""
        self.writer = LogWriter(warn)

    def _open(self) -> None:
        self.file = FileIO(self.path, "a", opener=no_link)
        self._opened = os.fstat(self.file.fileno())

    def write(self, record: dict[str, Any]) -> None:
        """Writes a line of JSON, and each number but the step as a TensorBoard scalar.

        The numbers of a list are the scalars `name/0`, `name/1`, ...
        """
        self.records.append(record)
        self.writer.start(self.path, partial(self._append, f"{json.dumps(record)}\n".encode()))
        self.writer.start(self.path.parent, partial(self._show, record))

    def write_sample(self, step: int, text: str) -> None:
        """Appends a sample to samples.txt."""
        path = self.path.with_name("samples.txt")
        self.writer.start(path, partial(_append_text, path, f"=== step {step} ===\n{text}\n\n"))

    def _append(self, line: bytes) -> None:
        if not (self.path.exists() and os.path.samestat(self._opened, os.stat(self.path))):
            self.file.close()
            self._open()
            self.torn = False
            self.writer.warn(f"{self.path} was removed or replaced: further records follow there")
        line = b"\n" + line if self.torn else line
        self.torn = True
        while line:
            line = line[self.file.write(line) :]
        self.torn = False

    def _show(self, record: dict[str, Any]) -> None:
        os.stat(self.path.parent)  # without it the board's own thread would print a traceback
        for name, value in record.items():
            if isinstance(value, list):
                for number, part in enumerate(value):
                    self.board.add_scalar(f"{name}/{number}", part, record["step"])
            elif name != "step" and value is not None:
                self.board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flushes everything and draws loss.png."""
        self.writer.start(self.path, self.file.close)
        self.writer.start(self.path.parent, self.board.close)
        curves = self.path.with_name("loss.png")
        self.writer.start(curves, partial(plot_losses, self.records, curves, self.title))
        self.writer.close()


def _append_text(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8", opener=no_link) as file:
        file.write(text)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl, without lines that were cut short or damaged."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(parse_json(line))
    return [record for record in records if isinstance(record, dict)]


def _is_whole(record: dict[str, Any]) -> bool:
    """Returns True if a record is one that `MetricsLog` wrote: numbers of a step."""
    kinds = {type(value) for value in record.values()}
    counts = {type(record.get(name)) for name in ("step", "tokens")}
    figures = [record.get("val_loss", 1.0), record.get("tok_per_s", 1.0)]
    fine = counts == {int} and {type(x) for x in figures} <= {int, float} and figures[1] > 0
    return fine and kinds <= {int, float, list, type(None)}


# --- the plot -------------------------------------------------------------------------------------


def plot_losses(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws training and validation loss over tokens, and the training time above, as a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    training = [r for r in records if r.get("train_loss") is not None]
    if training:
        tokens, losses = ([r[key] for r in training] for key in ("tokens", "train_loss"))
        axes.plot(tokens, losses, color="C0", alpha=0.25, linewidth=1)
        axes.plot(tokens, smoothed(losses), color="C0", label="training (smoothed)")
        _add_time_axis(axes, training)
    validation = [(r["tokens"], r["val_loss"]) for r in records if "val_loss" in r]
    if validation:
        axes.plot(*zip(*validation, strict=True), "o", color="C1", label="validation")
    bottom, top = interesting_range(
        [r[key] for r in records for key in LOSSES if r.get(key) is not None]
    )
    if bottom < top:
        axes.set_ylim(bottom, top)
    axes.set(title=title, xlabel="tokens", ylabel="loss (nats per token)", xlim=(0, None))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)


def smoothed(values: list[float]) -> list[float]:
    """Computes bias-corrected exponential moving averages over about a twentieth of the values."""
    decay = 1 - 1 / max(4, len(values) / 20)
    total = weight = 0.0
    averages = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        averages.append(total / weight)
    return averages


def interesting_range(losses: list[float]) -> tuple[float, float]:
    """Returns the y-limits for a plot of losses in the order of training, without the steep fall of
    the first tenth, so that the rest stays readable."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    later = finite[len(finite) // 10 :]
    if not later:
        return 0.0, 0.0
    margin = 0.05 * (max(later) - min(later))
    return min(finite) - margin, max(later) + margin


def _add_time_axis(axes: Any, training: list[dict[str, Any]]) -> None:
    """Adds an axis above the plot with the training time, without evaluations."""
    tokens = np.array([0, *(r["tokens"] for r in training)], dtype=float)
    seconds = np.cumsum(np.diff(tokens) / [r["tok_per_s"] for r in training], dtype=float)
    seconds = np.array([0, *seconds])
    if len(set(tokens)) < len(tokens) or not seconds[-1] > 0:
        return  # a record without new tokens: time is not a function of tokens
    above = axes.secondary_xaxis(
        "top",
        functions=(
            lambda x: np.interp(x, tokens, seconds),
            lambda s: np.interp(s, seconds, tokens),
        ),
    )
    above.set_xlabel("training time")
    above.xaxis.set_major_formatter(lambda s, _: duration(s))
