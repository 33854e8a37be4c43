"""Terminal output: a live bar on a terminal, plain lines everywhere else."""

import io
import math
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from fastgpt.terminal import one_line, printable


def command(uninstalled: str) -> str:
    """Returns the installed command that was typed (`fastgpt-train`), else `uninstalled`."""
    typed = Path(sys.argv[0])
    if not typed.name.startswith("fastgpt-"):
        return uninstalled
    return typed.name if shutil.which(typed.name) else shlex.quote(str(typed))


class Output:
    """`sys.stdout`, but a write that fails ends no run: a terminal may be closed, a disk full."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stdout.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class Bar(Progress):
    """One line, which leaves room for the `^C` that a terminal writes at its end."""

    def get_renderable(self) -> RenderableType:
        width = self.console.width - 3 if self.tasks else None  # the constructor calls it, too
        return Constrain(super().get_renderable(), width)


class Display:
    """Output of a training run; with `quiet`, as on all ranks but the main one, there is none."""

    def __init__(self, quiet: bool = False) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # no character of a sample may end a run
        file = cast("TextIO", Output())
        self.console = Console(file=file, highlight=False, soft_wrap=True, emoji=False, quiet=quiet)
        self.bar: Bar | None = None
        self.figures: list[str] = []
        """Figures of the newest step, the most useful first."""
        self.val_loss: float | None = None
        """Loss of the newest evaluation, which the bar shows."""

    def header(self, facts: dict[str, str]) -> None:
        """Prints names and values, one per line."""
        for name, value in facts.items():
            self.line(f"{name:<12}{one_line(value)}", wrap=True)

    def line(self, text: str, wrap: bool = False) -> None:
        """Prints one line of text, above the bar; with `wrap` a terminal breaks it between words.

        A step's figures are always broken there. A command must stay whole, to be copied.
        """
        wrap = self.console.is_terminal and (wrap or text.startswith("step "))
        self.console.print(printable(text), markup=False, soft_wrap=not wrap)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.console.print(one_line(f"warning: {text}"), style="yellow", markup=False)

    def start(self, step: int, steps: int) -> None:
        """Shows the bar, on a terminal."""
        if self.console.is_terminal and not self.console.quiet:
            rest = Column(ratio=1, no_wrap=True)  # cut off where the terminal is too narrow
            figures = "step {task.completed}/{task.total}  {task.description}"
            left = TimeRemainingColumn(compact=True), TextColumn("left")
            columns = *left, TextColumn(figures, table_column=rest)
            # not redirected: stdout would be the console, which writes to stdout
            self.bar = Bar(*columns, console=self.console, redirect_stdout=False, expand=True)
            self.bar.start()
            self.bar.add_task("", total=steps, completed=step)

    def step(self, record: dict[str, Any], steps: int, left: float | None) -> None:
        """Shows one log record, in the bar, or as a line with the time `left` in seconds."""
        loss = math.nan if record["train_loss"] is None else record["train_loss"]
        parts = [f"loss {loss:.4f}", f"{short(record['tok_per_s'])} tok/s"]
        norm = "inf" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        parts += [f"MFU {record['mfu']:.1%}", f"epoch {record['epoch']:.2f}", f"grad norm {norm}"]
        parts += [f"lr {record['lr']:.2e}", f"data wait {record['data_wait']:.1%}"]
        if "peak_memory_gib" in record:
            parts.append(f"{record['peak_memory_gib']:.1f} GiB")
        self.figures = parts
        if self.bar is None:
            parts += [f"{duration(left)} left"] if left else []
            self.line(f"step {record['step']:>6}/{steps}  {'  '.join(parts)}")
        else:
            self.bar.update(self.bar.task_ids[0], completed=record["step"])
            self.doing()

    def doing(self, what: str = "") -> None:
        """Shows an activity such as `saving` in the bar; if empty, the last step's figures."""
        if self.bar is not None:
            val = [] if self.val_loss is None else [f"val {self.val_loss:.4f}"]
            figures = "  ".join([*self.figures[:1], *val, *self.figures[1:]])
            self.bar.update(self.bar.task_ids[0], description=what or figures)

    def sample(self, text: str) -> None:
        """Shows a sample of the model's output."""
        self.line(f"--- sample ---\n{text}\n--------------")

    def stop(self) -> None:
        """Removes the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


class PrepareProgress(Progress):
    """Progress of preparing text on stderr, if that is a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        console = Console(stderr=True)
        super().__init__(
            SpinnerColumn(), TextColumn("preparing text: {task.completed:,} tokens"),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self.task = self.add_task("", total=None)

    def __call__(self, tokens: int) -> None:
        """Reports the number of tokens so far."""
        self.update(self.task, completed=tokens)


def duration(seconds: float) -> str:
    """Writes a time in its two largest units: 1 h 5 min, 7 min 3 s, 12 s."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {s} s" if minutes else f"{s} s"


def short(number: float) -> str:
    """Rounds a number to about three digits: 12.3M, 4.5k, 678."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + suffix
    return f"{number:.0f}"
