"""Metrics of a run, written to metrics.jsonl and loss.png, and the trackers that read them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastgpt.commands import install_command, installed
from fastgpt.errors import UserError, counted, writing
from fastgpt.files import no_link, parse_json, write_atomically

CLOSE_S = 30.0
"""Seconds that trackers get at the end of a run for what they have not shown yet."""


class MetricsLog:
    """Appends records to metrics.jsonl, which trackers read, and draws loss.png at the end.

    A write that fails, as on a full disk, does not end a run: the first one is a warning, and all
    are counted.

    Args:
        from_step: step at which the run starts; later records in the file are dropped, because a
            resumed run writes them again.
        title: title of loss.png.
        warn: called with a warning if something cannot be written: training goes on.
        track: names of trackers, or "none".
    """

    def __init__(
        self, run_dir: Path, from_step: int, title: str, warn: Callable[[str], None] = print,
        track: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.path, self.title, self.warn = run_dir / "metrics.jsonl", title, warn
        logged = filter(is_whole, read_records(self.path))
        self.records = [r for r in logged if r["step"] <= from_step]
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        with writing(self.path):
            write_atomically(self.path, text.encode())
        self.trackers = {
            name: subprocess.Popen(
                [sys.executable, "-P", "-m", "fastgpt.logs.trackers", name, run_dir.absolute()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
            )
            for name in track if track != "none"
        }  # fmt: skip
        self.lost = 0
        """Number of writes that have failed."""

    @contextmanager
    def _unfailing(self, path: Path) -> Iterator[None]:
        try:
            with writing(path):
                yield
        except Exception as error:  # Matplotlib's, too
            if not self.lost:
                self.warn(f"the logs cannot be written ({error}): training goes on")
            self.lost += 1

    def write(self, record: dict[str, Any]) -> None:
        """Writes a line of JSON, with the time of the clock in seconds."""
        record = {**record, "time": round(time.time(), 3)}
        self.records.append(record)
        with self._unfailing(self.path), open(self.path, "a", opener=no_link) as file:
            torn = "\n" * (self.lost > 0)  # the line before may be incomplete
            file.write(f"{torn}{json.dumps(record)}\n")

    def write_sample(self, step: int, text: str) -> None:
        """Appends a sample to samples.txt."""
        path = self.path.with_name("samples.txt")
        with self._unfailing(path), open(path, "a", encoding="utf-8", opener=no_link) as file:
            file.write(f"=== step {step} ===\n{text}\n\n")

    def close(self) -> None:
        """Ends the trackers, draws loss.png, and says how many writes have failed."""
        until = time.monotonic() + CLOSE_S
        for tracker in self.trackers.values():
            if tracker.stdin:
                tracker.stdin.close()
        curves = self.path.with_name("loss.png")
        with self._unfailing(curves):
            plot_losses(self.records, curves, self.title)
        for name, tracker in self.trackers.items():
            with suppress(subprocess.TimeoutExpired):
                tracker.wait(max(0, until - time.monotonic()))
            with suppress(ProcessLookupError):
                if sys.platform == "win32":
                    tracker.kill()
                else:  # its children, too
                    os.killpg(tracker.pid, signal.SIGKILL)
            if tracker.wait():
                self.warn(f"{name} was ended, or ended early: it does not show all of this run")
        if self.lost:
            self.warn(f"the logs are not complete: {counted(self.lost, 'write')} to them failed")


def check_trackers(track: Sequence[str]) -> None:
    """Raises `UserError` if the package of a tracker is missing."""
    for name in track:
        if track != "none" and installed(name) is None:
            raise UserError(f"--track {name} needs {name}: {install_command(name, name)}")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics.jsonl, without lines that were cut short or damaged."""
    return parse_records(path.read_text(errors="replace")) if path.exists() else []


def parse_records(text: str) -> list[dict[str, Any]]:
    """Parses lines of JSON; those that are no objects are left out."""
    records = []
    for line in text.splitlines():
        with suppress(ValueError):
            records.append(parse_json(line))
    return [record for record in records if isinstance(record, dict)]


def is_whole(record: dict[str, Any]) -> bool:
    """Returns True if a record has the step, tokens and losses that `MetricsLog` wrote."""
    counts = {type(record.get(name)) for name in ("step", "tokens")}
    small = all(abs(value) < 2**63 for value in record.values() if type(value) is int)
    vals = (record.get(name, 0.0) for name in ("val_loss", "val_loss_compared"))
    losses = isinstance(record.get("train_loss"), float | None) and {*map(type, vals)} == {float}
    return counts == {int} and small and losses


def comparable(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the evaluations, with their loss over the text that the last but one has scored.

    The last may have scored more: then it has `val_loss_compared`, or in earlier logs is left out.
    """
    evaluated = [record for record in records if "val_loss" in record]
    size = evaluated[-2:][0].get("val_tokens") if evaluated else None
    return [
        r | {"val_loss": r.get("val_loss_compared", r["val_loss"]), "val_tokens": size}
        for r in evaluated
        if "val_loss_compared" in r or r.get("val_tokens") == size
    ]


def plot_losses(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws training and validation loss over tokens as a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, key, style in (("training", "train_loss", "-"), ("validation", "val_loss", "o")):
        points = [(r["tokens"], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name)
            axes.legend()
    if known := [r for r in comparable(records) if r["val_loss"] > 0]:
        best = min(known, key=lambda record: record["val_loss"])
        over = f" over {best['val_tokens']:,} tokens" if best["val_tokens"] else ""
        label = f"lowest{over}: {best['val_loss']:.4f} at step {best['step']:,}"
        axes.plot(best["tokens"], best["val_loss"], "k*", markersize=12, label=label)
        axes.legend()
    axes.set_yscale("log")  # the steep fall of the first steps leaves room for the rest
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title=title, xlabel="tokens", ylabel="loss (nats per token)", xlim=(0, None))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(which="both", alpha=0.3)
    figure.savefig(path, dpi=120)
