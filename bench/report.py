"""Lays out records: tables for the terminal and for pages, and the plot of docs/benchmarks.md."""

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.records import Record
from fastgpt.errors import UserError, writing
from fastgpt.files import write_atomically

DOCS = Path(__file__).parents[1] / "docs"


def three_digits(x: float) -> str:
    """Formats a number with three significant digits and no exponent: 0.844, 36.2, 1,040."""
    rounded = float(f"{x:.3g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:g}"


def quantiles_of(row: Record, scale: float = 1.0) -> str:
    """Formats the figure of a record, times `scale`, as p20 p50 p80."""
    return " ".join(three_digits(scale * row["figure"][p]) for p in ("p20", "p50", "p80"))


def show(header: str, lines: Iterable[Iterable[str]]) -> None:
    """Prints a table; `header` has its columns, with | between them."""
    table = Table(*header.split("|"))
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def table(header: str, lines: Iterable[Iterable[str]]) -> str:
    """Returns the same table in Markdown."""
    columns = header.split("|")
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def put_into(path: Path, text: str, page: Path | None = None) -> None:
    """Writes `text` between the two marks of a page, whose rest is written by hand.

    Args:
        path: the page to read.
        page: the page to write; by default the same.

    Raises:
        UserError: the page lacks a mark, or cannot be written.
    """
    begin, end = "<!-- from the records -->", "<!-- to here -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError(f"{path} lacks the marks {begin} and {end}: put them back")
    page = page or path
    with writing(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, f"{before}{begin}\n{text}{end}{after}".encode())
