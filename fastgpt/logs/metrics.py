"""Metrics of a run, written to metrics.jsonl, TensorBoard events and loss.png."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from fastgpt.errors import UserError, brief, counted, writing
from fastgpt.files import no_link, parse_json, write_atomically


class MetricsLog:
    """Appends records to metrics.jsonl and TensorBoard events, and draws loss.png at the end.

    A write that fails, as on a full disk, does not end a run: the first one is a warning, and all
    are counted.

    Args:
        from_step: step at which the run starts; later records in the file are dropped, because a
            resumed run writes them again.
        title: title of loss.png.
        warn: called with a warning if something cannot be written: training goes on.
    """

    def __init__(
        self, run_dir: Path, from_step: int, title: str, warn: Callable[[str], None] = print
    ) -> None:
        # slow to import: only the main rank needs it
        from torch.utils.tensorboard import SummaryWriter

        self.path, self.title, self.warn = run_dir / "metrics.jsonl", title, warn
        logged = [r for r in read_records(self.path) if is_whole(r)]
        self.records = [r for r in logged if r["step"] <= from_step]
        kept = "".join(json.dumps(record) + "\n" for record in self.records)
        with writing(self.path):
            write_atomically(self.path, kept.encode())
            self._open()
            self.board = SummaryWriter(
                str(run_dir), purge_step=from_step + 1 if from_step else None
            )
        self.torn = False
        """True if the last line of the file may be incomplete."""
        self.lost = 0
        """Number of writes that have failed."""

    def _open(self) -> None:
        self.file = FileIO(self.path, "a", opener=no_link)
        self._opened = os.fstat(self.file.fileno())

    @contextmanager
    def _unfailing(self, path: Path) -> Iterator[None]:
        try:
            with writing(path):
                yield
        except Exception as error:  # whatever a tracker raises
            if not self.lost:
                why = str(error) if isinstance(error, UserError) else brief(error)
                self.warn(f"the logs cannot be written ({why}): training goes on")
            self.lost += 1

    def write(self, record: dict[str, Any]) -> None:
        """Writes a line of JSON, and each number but the step as a TensorBoard scalar.

        The numbers of a list are the scalars `name/0`, `name/1`, ...
        """
        self.records.append(record)
        with self._unfailing(self.path):
            self._append(f"{json.dumps(record)}\n".encode())
        with self._unfailing(self.path.parent):
            os.stat(self.path.parent)  # without it the board's own thread would print a traceback
            for name, value in record.items():
                if isinstance(value, list):
                    for number, part in enumerate(value):
                        self.board.add_scalar(f"{name}/{number}", part, record["step"])
                elif name != "step" and value is not None:
                    self.board.add_scalar(name, value, record["step"])

    def write_sample(self, step: int, text: str) -> None:
        """Appends a sample to samples.txt."""
        path = self.path.with_name("samples.txt")
        with self._unfailing(path), open(path, "a", encoding="utf-8", opener=no_link) as file:
            file.write(f"=== step {step} ===\n{text}\n\n")

    def _append(self, line: bytes) -> None:
        if not (self.path.exists() and os.path.samestat(self._opened, os.stat(self.path))):
            self.file.close()
            self._open()
            self.torn = False
            self.warn(f"{self.path} was removed or replaced: further records follow there")
        line = b"\n" + line if self.torn else line
        self.torn = True
        while line:
            line = line[self.file.write(line) :]
        self.torn = False

    def close(self) -> None:
        """Flushes everything, draws loss.png, and says how many writes have failed."""
        with self._unfailing(self.path):
            self.file.close()
        with self._unfailing(self.path.parent):
            self.board.close()
        curves = self.path.with_name("loss.png")
        with self._unfailing(curves):
            plot_losses(self.records, curves, self.title)
        if self.lost:
            self.warn(f"the logs are not complete: {counted(self.lost, 'write')} to them failed")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl, without lines that were cut short or damaged."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(parse_json(line))
    return [record for record in records if isinstance(record, dict)]


def is_whole(record: dict[str, Any]) -> bool:
    """Returns True if a record is one that `MetricsLog` wrote: numbers of a step."""
    kinds = {type(value) for value in record.values()}
    counts = {type(record.get(name)) for name in ("step", "tokens")}
    figures = [record.get("val_loss", 1.0), record.get("tok_per_s", 1.0)]
    fine = counts == {int} and {type(x) for x in figures} <= {int, float} and figures[1] > 0
    fine = fine and all(abs(x) < 2**63 for x in record.values() if type(x) is int)
    return fine and kinds <= {int, float, list, type(None)}


# --- the plot -------------------------------------------------------------------------------------


def plot_losses(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws training and validation loss over tokens as a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    training = [r for r in records if r.get("train_loss") is not None]
    if training:
        tokens, losses = ([r[key] for r in training] for key in ("tokens", "train_loss"))
        axes.plot(tokens, losses, color="C0", alpha=0.25, linewidth=1)
        axes.plot(tokens, smoothed(losses), color="C0", label="training (smoothed)")
    validation = [(r["tokens"], r["val_loss"]) for r in records if "val_loss" in r]
    if validation:
        axes.plot(*zip(*validation, strict=True), "o", color="C1", label="validation")
    both = [r[key] for r in records for key in ("train_loss", "val_loss") if r.get(key) is not None]
    bottom, top = interesting_range(both)
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
