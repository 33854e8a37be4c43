"""Printing of all commands, through one filter that lets no control character through.

Generated text, file names and the content of foreign files may hold escape sequences, with which a
terminal changes its title, its clipboard or the text that it shows. rich, which doctor works
without, is imported where it is used, and chooses the colours: the terminal's own 16, or none.
"""

import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ACTED_ON = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0 and C1, in which escape sequences begin
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of writing
    "\u2028\u2029\ud800-\udfff]"  # end a line; halves of characters, which UTF-8 cannot hold
)


def printable(text: str) -> str:
    """Replaces what a terminal would act on by U+FFFD; newlines and tabs stay."""
    text = text.replace("\r\n", "\n")
    return _ACTED_ON.sub(lambda m: m[0] if m[0] in "\n\t" else REPLACEMENT, text)


def one_line(text: str) -> str:
    r"""Replaces what a terminal would act on, newlines too, by escapes such as `\x1b`."""
    return _ACTED_ON.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def console(to: TextIO, **options: Any) -> "Console":
    """Returns rich's console, which moves no cursor in a pipe, even where FORCE_COLOR is set."""
    from rich.console import Console

    options |= {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
    return Console(file=to, force_interactive=None if to.isatty() else False, **options)


def print_line(line: str) -> None:
    """Prints one line to stderr; on a terminal an error is red, a warning yellow."""
    kind = line.partition(":")[0].rpartition(" ")[2]
    try:
        style = {"error": "red", "warning": "yellow"}.get(kind)
        console(sys.stderr).print(one_line(line), style=style)
    except ImportError:
        print(one_line(line), file=sys.stderr)


def print_text(text: str, end: str = "\n") -> None:
    """Prints text to stdout, and `end`; into a pipe or a file, as it is."""
    text = printable(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"  # the C locale's may lack characters
    print(text.encode(encoding, "replace").decode(encoding), end=end, flush=True)


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lays out rows of cells; the columns whose numbers are in `right` are aligned to the right.

    A terminal breaks cells between words; in a pipe each row is one line.
    """
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*map(one_line, row))
    for column in right:
        grid.columns[column].justify = "right"
    screen = console(io.StringIO(), width=None if sys.stdout.isatty() else 10**6)
    with screen.capture() as shown:
        screen.print(grid, soft_wrap=False)
    return re.sub(" +\n", "\n", shown.get()).rstrip("\n")


@contextmanager
def status(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows on stderr, if that is a terminal, the text that the yielded function is given."""
    with console(sys.stderr, quiet=quiet or not sys.stderr.isatty()).status("") as shown:
        yield shown.update


@contextmanager
def preparing(quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Shows as `status` does the number of tokens that the yielded function is given."""
    with status(quiet) as show:
        yield lambda tokens: show(f"preparing text: {tokens:,} tokens")


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


class Display:
    """Output of a training run; with `quiet`, as on all ranks but the main one, there is none."""

    def __init__(self, quiet: bool = False) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # no character of a sample may end a run
        self.console = console(cast("TextIO", Output()), quiet=quiet)
        self.bar: Live | None = None
        self.place = ""
        """Time left and the step, with which the bar begins."""
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
        wrap = self.console.is_interactive and (wrap or text.startswith("step "))
        self.console.print(printable(text), soft_wrap=not wrap)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.console.print(one_line(f"warning: {text}"), style="yellow")

    def sample(self, text: str) -> None:
        """Shows a sample of the model's output."""
        self.line(f"--- sample ---\n{text}\n--------------", wrap=True)

    def start(self, step: int, steps: int) -> None:
        """Shows the bar, on a terminal."""
        self.place = f"step {step}/{steps}"
        if self.console.is_interactive and not self.console.quiet:
            from rich.live import Live

            # not redirected: stdout would be the console, which writes to stdout
            self.bar = Live(console=self.console, auto_refresh=False, redirect_stdout=False)
            self.bar.start()
            self.doing()

    def step(self, record: dict[str, Any], steps: int, left: float | None) -> None:
        """Shows one log record, in the bar, or as a line with the time `left` in seconds."""
        loss = math.nan if record["train_loss"] is None else record["train_loss"]
        parts = [f"loss {loss:.4f}", f"{short(record['tok_per_s'])} tok/s"]
        norm = "inf" if record["grad_norm"] is None else f"{record['grad_norm']:.3f}"
        parts += [f"MFU {record['mfu']:.1%}", f"epoch {record['epoch']:.2f}", f"grad norm {norm}"]
        parts += [f"lr {record['lr']:.2e}", f"data wait {record['data_wait']:.1%}"]
        if "peak_memory_gib" in record:
            parts.append(f"{record['peak_memory_gib']:.1f} GiB")
        rest = [f"{timedelta(seconds=round(left))} left"] if left else []
        self.place, self.figures = " ".join([*rest, f"step {record['step']}/{steps}"]), parts
        if self.bar is None:
            self.line(f"step {record['step']:>6}/{steps}  {'  '.join(parts + rest)}")
        else:
            self.doing()

    def doing(self, what: str = "") -> None:
        """Shows an activity such as `saving` in the bar; if empty, the last step's figures."""
        if self.bar is not None:
            val = [] if self.val_loss is None else [f"val {self.val_loss:.4f}"]
            figures = "  ".join([*self.figures[:1], *val, *self.figures[1:]])
            width = max(0, self.console.width - 3)  # room for the `^C` that a terminal writes
            line = f"{self.place}  {what or figures}"
            self.bar.update(f"{line:<{width}.{width}}", refresh=True)

    def stop(self) -> None:
        """Ends the bar, whose last line stays."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def short(number: float) -> str:
    """Rounds a number to about three digits: 12.3M, 4.5k, 678."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + suffix
    return f"{number:.0f}"
