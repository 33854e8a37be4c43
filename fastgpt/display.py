"""What a person sees: a live bar with rich on a terminal, plain lines everywhere else."""

import io
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """The main rank's terminal."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a sample must not end a run
        self.console = Console(highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal
        self.bar: Progress | None = None

    def mute(self) -> None:
        """Shows nothing from here on: what every other rank does."""
        self.console.quiet, self.live = True, False

    def header(self, facts: dict[str, str]) -> None:
        """Names and values, one a line."""
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            if self.live:
                table.add_row(f"[bold]{name}", escape(value))
            else:
                self.line(f"{name:<12}{value}")
        if self.live:
            self.console.print(table)

    def line(self, text: str) -> None:
        """One line of text, above the bar."""
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """A line that must not be missed."""
        self.console.print(f"warning: {text}", style="yellow", markup=False)

    def start(self, step: int, steps: int) -> None:
        """Shows the bar."""
        if self.live:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.bar.add_task("", total=steps, completed=step)

    def step(self, record: dict[str, Any], steps: int) -> None:
        """One log record: the bar moves, or a line is printed."""
        text = (
            f"loss {record['train_loss']:.4f}  {_short(record['tok_per_s'])} tok/s  "
            f"MFU {record['mfu']:.1%}"
        )
        if "peak_memory_gib" in record:
            text += f"  {record['peak_memory_gib']:.1f} GiB"
        norm = record["grad_norm"]
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=record["step"], description=text)
        else:
            self.line(
                f"step {record['step']:>6}/{steps}  {text}  lr {record['lr']:.2e}  "
                f"grad norm {'inf' if norm is None else f'{norm:.3f}'}"
            )

    def sample(self, text: str) -> None:
        """A sample of the model's output."""
        if self.live:
            self.console.print(Panel(escape(text), title="sample", title_align="left"))
        else:
            self.line(f"--- sample ---\n{text}\n--------------")

    def stop(self) -> None:
        """Takes the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _short(number: float) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"
