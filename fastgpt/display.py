"""Terminal output: a live bar on a terminal, plain lines everywhere else."""

import io
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fastgpt.errors import counted, reason
from fastgpt.terminal import one_line, print_line, printable, replaced_note

QUIET_S = 3
"""Seconds of preparing text before a bar is shown."""
ENOUGH = 0.001
"""Fraction of a text that must be read before the time left is estimated."""
LINE_S = 10
"""Seconds between two lines of progress where there is no terminal to draw a bar on."""
BAR_WIDTHS = {160: 40, 120: 20, 100: 10}
"""Width of the bar, by minimum width of the terminal; narrower terminals have no bar."""


def command(uninstalled: str) -> str:
    """Returns the installed command that was typed (`fastgpt-train`), else `uninstalled`."""
    typed = Path(sys.argv[0])
    if not typed.name.startswith("fastgpt-"):
        return uninstalled
    return typed.name if shutil.which(typed.name) else shlex.quote(str(typed))


class Output:
    """`sys.stdout`, but a write that fails, as on a full disk, does not end a run."""

    def __init__(self) -> None:
        self.lost = 0
        self.rich_proxied_file = self
        """Where Rich writes while it shows a bar: here, not to the file behind it."""

    @property
    def _behind(self) -> TextIO:
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def write(self, text: str) -> None:
        with self._unfailing():
            self._behind.write(text)

    def flush(self) -> None:
        with self._unfailing():
            self._behind.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    @contextmanager
    def _unfailing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.lost:
                self._warn(f"stdout: {reason(error)}: training goes on")
            self.lost += 1

    def close(self) -> None:
        """Says on stderr how much is missing, if anything is."""
        if self.lost:
            self._warn(f"stdout is not complete: {counted(self.lost, 'write')} to it failed")

    def _warn(self, text: str) -> None:
        with suppress(OSError):  # of a terminal that was closed, both fail
            print_line(f"warning: {text}")


class TimeLeft(TimeRemainingColumn):
    """Time left for the steps; empty after the last one, while the final evaluation goes on."""

    def render(self, task: Task) -> Text:
        return Text() if task.finished else super().render(task)


class Display:
    """Output of a training run, shown by the main rank."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # no character of a sample may end a run
        self.output = Output()
        file = cast("TextIO", self.output)
        self.console = Console(file=file, highlight=False, soft_wrap=True, emoji=False)
        self.live = self.console.is_terminal
        self.bar: Progress | None = None
        self.said_at = time.monotonic()
        self.figures: list[str] = []
        """Figures of the newest step, the most useful first."""
        self.val_loss: float | None = None
        """Loss of the newest evaluation, which the bar shows."""

    def mute(self) -> None:
        """Turns all output off; used on every rank but the main one."""
        self.console.quiet, self.live = True, False

    def header(self, facts: dict[str, str]) -> None:
        """Prints names and values, one per line."""
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            if self.live:
                table.add_row(f"[bold]{name}", escape(one_line(value)))
            else:
                self.line(f"{name:<12}{one_line(value)}")
        if self.live:
            self.console.print(table)

    def line(self, text: str) -> None:
        """Prints one line of text, above the bar."""
        self.said_at = time.monotonic()
        self.console.print(printable(text), markup=False)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.console.print(one_line(f"warning: {text}"), style="yellow", markup=False)

    def start(self, step: int, steps: int) -> None:
        """Shows the bar."""
        if self.live:
            width = next((w for least, w in BAR_WIDTHS.items() if self.console.width >= least), 0)
            columns = [
                *[BarColumn(width)] * bool(width),
                TextColumn("step {task.completed}/{task.total}"),
                TimeLeft(compact=True),
                TextColumn("{task.description}"),
            ]
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.bar.add_task("", total=steps, completed=step)
            # the remaining columns show the figures of a step; the time left takes up to 7
            self.room = self.console.width - width - len(f"step {steps}/{steps}") - 7 - 3

    def step(self, record: dict[str, Any], steps: int) -> None:
        """Shows one log record, in the bar or as a line."""
        speed = [f"{short(record['tok_per_s'])} tok/s", f"MFU {record['mfu']:.1%}"]
        epoch, wait = f"epoch {record['epoch']:.2f}", f"data wait {record['data_wait']:.1%}"
        memory = [f"{record[key]:.1f} GiB" for key in ("peak_memory_gib",) if key in record]
        norm = "inf" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        loss = math.nan if record["train_loss"] is None else record["train_loss"]
        if self.bar is not None:
            rates = [f"lr {record['lr']:.1e}", f"norm {norm}", *speed]
            self.figures = [f"loss {loss:.3f}", *rates, wait, *memory, epoch]
            self.bar.update(self.bar.task_ids[0], completed=record["step"])
            self.doing()
            return
        parts = [f"loss {loss:.4f}", *speed, epoch, wait, *memory]
        parts += [f"lr {record['lr']:.2e}", f"grad norm {norm}"]
        self.line(f"step {record['step']:>6}/{steps}  {'  '.join(parts)}")

    def doing(self, what: str = "") -> None:
        """Shows an activity other than training; in a log file at most every 10 s.

        Args:
            what: such as `saving`; if empty, the bar shows the figures of the last step again.
        """
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], description=what or self._fitting())
        elif what and time.monotonic() - self.said_at >= LINE_S:
            self.line(what)

    def _fitting(self) -> str:
        """Joins as many of the newest figures as fit beside the step."""
        val = [] if self.val_loss is None else [f"val {self.val_loss:.3f}"]
        parts = [*self.figures[:1], *val, *self.figures[1:]]
        while len("  ".join(parts)) > self.room and len(parts) > 1:
            parts.pop()
        return "  ".join(parts)

    def sample(self, text: str) -> None:
        """Shows a sample of the model's output."""
        if self.live:
            self.console.print(Panel(Text(printable(text)), title="sample", title_align="left"))
        else:
            self.line(f"--- sample ---\n{text}\n--------------")
        if note := replaced_note(text):
            self.line(note)

    def stop(self) -> None:
        """Removes the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class PrepareProgress:
    """Progress of preparing text: share done, tokens, tokens/s and time left, on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal
        columns = (
            BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=self.console)
        self.task = self.bar.add_task("", total=1.0)
        self.began, self.shown = time.monotonic(), 0.0
        self.first: tuple[float, int, float] | None = None

    def __enter__(self) -> "PrepareProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar.live.is_started:  # else, without a terminal, it would print an empty line
            self.bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds since preparation began."""
        return time.monotonic() - self.began

    def __call__(self, tokens: int, share: float) -> None:
        """Reports the number of tokens so far, and the share of the text that has been read."""
        if self.first is None:
            self.first = (share, tokens, self.seconds)  # not 0 for a resumed preparation
        fresh, seconds = share - self.first[0], max(self.seconds - self.first[2], 1e-9)
        text = f"{tokens:,} tokens, {short((tokens - self.first[1]) / seconds)} tokens/s"
        if self.live and self.seconds >= QUIET_S:
            self.bar.start()
            self.bar.update(self.task, completed=share, description=text)
        elif self.seconds - self.shown >= LINE_S:
            self.shown = self.seconds
            if fresh >= ENOUGH and seconds >= QUIET_S:
                text += f", about {duration(seconds * (1 - share) / fresh)} left"
            self.console.print(f"preparing text: {share:.1%}, {text}")


def short(number: float) -> str:
    """Rounds a number to about three digits: 12.3M, 4.5k, 678."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + suffix
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Writes a duration in the largest unit of which it is 2 or more, else in seconds."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
