"""Lays out records: tables and the plot of docs/benchmarks.md.

`python -m bench.report` moves the local records beside the committed ones and writes them into the
page, whose other parts are written by hand.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure  # without pyplot: no display is looked for
from rich.console import Console
from rich.table import Table

from bench import records
from bench.records import Record, is_ours
from fastgpt.errors import UsageError, UserError, run_command, writing
from fastgpt.files import write_atomically

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"


def three_digits(x: float) -> str:
    """Formats a number with three significant digits and no exponent: 0.844, 36.2, 1,040."""
    rounded = float(f"{x:.3g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:g}"


def quantiles_of(row: Record, scale: float = 1.0) -> str:
    """Formats the figure of a record, times `scale`, as p20 p50 p80."""
    return " ".join(three_digits(scale * row["figure"][p]) for p in ("p20", "p50", "p80"))


def rate(row: Record) -> str:
    """Formats an op's FLOP/s or bytes/s, whichever limits it."""
    if row["bound"] == "copy":
        return f"{three_digits(row['gb_per_s'])} GB/s"
    tera = row["tflops"]
    return f"{three_digits(tera)} TFLOP/s" if tera >= 1 else f"{three_digits(1e3 * tera)} GFLOP/s"


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


# --- what records say -----------------------------------------------------------------------------


def ours_and_best(rows: list[Record]) -> tuple[Record | None, Record | None]:
    """Returns our fastest record of a case and the fastest of all others; None if there is none."""
    timed = sorted((row for row in rows if row["figure"]), key=lambda row: row["figure"]["p50"])
    found = [next((row for row in timed if is_ours(row) == mine), None) for mine in (True, False)]
    return found[0], found[1]


def times_ours(row: Record, ours: Record) -> float:
    return row["figure"]["p50"] / ours["figure"]["p50"]


def last_passes(rows: Iterable[Record]) -> list[list[Record]]:
    """Returns the timed records of each op's case in groups: of `both`, or of the forward alone."""
    groups: dict[str, dict[str, list[Record]]] = {}
    for row in rows:
        if row["figure"] and "bound" in row:
            name, _, which = row["case"].rpartition("/")
            groups.setdefault(name, {}).setdefault(which, []).append(row)
    return [passes.get("both", passes.get("fwd", [])) for passes in groups.values()]


def summary(group: list[Record]) -> tuple[str, ...] | None:
    """Returns case, ours in ms, best peer, its time in ms, ratio, and share of the limit."""
    ours, best = ours_and_best(group)
    if ours is None:
        return None
    name, _, which = ours["case"].rpartition("/")
    mine = (f"{name} {which}", three_digits(ours["figure"]["p50"] * 1e3))
    share = f"{ours['share']:.0%}"
    if best is None:
        return (*mine, "", "", "", share)
    ms = three_digits(best["figure"]["p50"] * 1e3)
    return (*mine, best["implementation"], ms, f"{times_ours(best, ours):.2f}x", share)


# --- docs/benchmarks.md ---------------------------------------------------------------------------


def op_table(rows: list[Record]) -> str:
    """Returns a line for each op: its first case, and the ratios of all others."""
    ops: dict[str, list[tuple[str, ...]]] = {}
    for found in filter(None, map(summary, last_passes(rows))):
        ops.setdefault(found[0].split("/")[0], []).append(found)
    lines = []
    for first, *others in ops.values():
        ratios = sorted((found[4] for found in others if found[4]), key=lambda x: float(x[:-1]))
        ends = " to ".join(dict.fromkeys((ratios[0], ratios[-1]))) if ratios else ""
        spread = f"{ends} ({len(ratios)})" * bool(ratios)
        lines.append((*first, spread))
    header = "op|ours, ms|best peer|its ms|its time / ours|of the limit|all other cases"
    return table(header, lines)


def other_table(rows: list[Record]) -> str:
    """Returns a line for each step, race and generated text, with all implementations' times."""
    cases: dict[str, list[Record]] = {}
    for row in rows:
        if row["figure"] and row["case"].startswith(("step/", "race/", "generate/")):
            cases.setdefault(row["case"], []).append(row)
    lines = []
    for case, group in cases.items():
        group.sort(key=lambda row: row["figure"]["p50"])
        scale, unit = (1e3, "ms") if group[0]["figure"]["p50"] < 1 else (1, "s")
        cells = []
        for row in group:
            name = f"**{row['implementation']}**" if is_ours(row) else row["implementation"]
            loss = f" (loss {row['val_loss'][-1]:.3f})" if "val_loss" in row else ""
            cells.append(f"{name} {three_digits(scale * row['figure']['p50'])}{loss}")
        lines.append((case, unit, ", ".join(cells), group[0]["commit"][:7]))
    return table("case|unit|medians, fastest first|commit", lines)


def plot(rows: list[Record], path: Path) -> None:
    """Draws the best peer's time over ours for every case of every op, a panel for each device."""
    devices = sorted({row["device"] for row in rows if "bound" in row})
    figure = Figure(figsize=(10, 2.6 * len(devices)), layout="constrained")
    for axes, device in zip(figure.subplots(len(devices), squeeze=False)[:, 0], devices):
        groups = last_passes(row for row in rows if row["device"] == device)
        ratios: dict[str, list[float]] = {}
        for ours, best in map(ours_and_best, groups):
            if ours and best:
                ratios.setdefault(ours["case"].split("/")[0], []).append(times_ours(best, ours))
        for place, values in enumerate(ratios.values()):
            axes.plot([place] * len(values), values, "o", alpha=0.6, color="tab:blue")
        axes.axhline(1, color="grey", linewidth=1)
        axes.set_xticks(range(len(ratios)), list(ratios), rotation=20, fontsize=7, ha="right")
        axes.set(title=device, yscale="log", ylabel="best peer / ours")
        axes.set_yticks((0.3, 0.5, 1, 2, 4), ("0.3", "0.5", "1", "2", "4"))
        axes.minorticks_off()
        axes.grid(alpha=0.3, axis="y")
    path.parent.mkdir(parents=True, exist_ok=True)
    # no date and no version inside: the same records give the same bytes
    figure.savefig(path, dpi=100, metadata={"Software": None})


def section(device: str, rows: list[Record]) -> str:
    """Returns the tables of one device."""
    last = max(rows, key=lambda row: row["run"])
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    rates = (f"{row['case'][8:]} {row['figure']['p50'] / 1e9:,.0f} G{row['unit']}"
             for row in rows if row["case"].startswith("machine/") and row["figure"])  # fmt: skip
    limits = f" Limits of the machine: {', '.join(rates)}."
    text = f"\n## {device}\n\n{versions}; [records](../bench/results/{records.slug(device)}.jsonl)."
    text += limits * any(row["case"].startswith("machine/") for row in rows) + "\n"
    ops = [row for row in rows if "bound" in row]
    if ops:
        ratios = [
            float(found[4][:-1]) for found in map(summary, last_passes(ops)) if found and found[4]
        ]
        faster, slower = sum(x > 1 for x in ratios), sum(x < 1 for x in ratios)
        text += (
            f"\nOurs is faster than the best peer in {faster} of {len(ratios)} cases, as fast in"
            f" {len(ratios) - faster - slower}, and slower in {slower}.\n\n{op_table(ops)}"
        )
    return text + f"\n{other_table(rows)}"


def write_page(page: Path = PAGE) -> None:
    """Writes the committed records into the page, and the plot beside it."""
    rows = [row for row in records.read() if row["on"] in ("cpu", "cuda")]
    devices = sorted({row["device"] for row in rows})
    plot(rows, page.with_suffix("") / "ops.png")
    text = "".join(section(d, [row for row in rows if row["device"] == d]) for d in devices)
    put_into(page, text)


def publish() -> Path:
    """Publishes the local records and writes the page; returns its path."""
    records.publish()
    write_page()
    return PAGE


def main(argv: list[str]) -> None:
    if argv:
        raise UsageError(f"{argv[0]} is given: expected no argument, as in python -m bench.report")
    print(f"wrote {publish()}")


if __name__ == "__main__":
    run_command(main)
