"""Lays out records: tables and the plot of docs/benchmarks.md.

`python -m bench.report` moves the local records beside the committed ones and writes them into the
page, whose other parts are written by hand.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import records
from bench.records import Record, grouped, is_ours
from fastgpt import flags
from fastgpt.errors import UserError, run_command, writing
from fastgpt.files import write_atomically

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks.md"
Duel = tuple[Record, Record | None]
"""Our record of a case and the best peer's, if there is one."""


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
    """Writes `text` between the two marks of a page, or into a copy of it, `page`.

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


def limits_of(rows: list[Record]) -> str:
    """Formats the machine's limits among the records: copy 37 GB/s."""
    found = (row for row in rows if row["case"].startswith("machine/") and row["figure"])
    return ", ".join(f"{x['case'][8:]} {median(x) / 1e9:,.0f} G{x['unit']}" for x in found)


def median(row: Record) -> float:
    return row["figure"]["p50"]


def fastest(rows: Iterable[Record], *, ours: bool) -> Record | None:
    """Returns the fastest of our records, or of the others."""
    found = (row for row in rows if row["figure"] and is_ours(row) == ours)
    return min(found, key=median, default=None)


def times_ours(row: Record, ours: Record) -> float:
    return median(row) / median(ours)


def duels(rows: Iterable[Record]) -> dict[str, list[Duel]]:
    """Returns our record and the best peer's of each op's case, with its backward."""
    ops, cases = dict[str, list[Duel]](), grouped((row for row in rows if "bound" in row), "case")
    for case, group in cases.items():
        name, _, which = case.rpartition("/")
        last = "both" if f"{name}/both" in cases else "fwd"
        if which == last and (ours := fastest(group, ours=True)):
            ops.setdefault(name.partition("/")[0], []).append((ours, fastest(group, ours=False)))
    return ops


def ratios(found: Iterable[Duel]) -> list[float]:
    """Returns the best peer's time over ours of each case that has one."""
    return [times_ours(best, ours) for ours, best in found if best]


def summary(ours: Record, best: Record | None) -> tuple[str, ...]:
    """Returns case, ours in ms, best peer, its time in ms, and the ratio."""
    name, _, which = ours["case"].rpartition("/")
    mine, its = (three_digits(median(row) * 1e3) if row else "" for row in (ours, best))
    who, ratio = (best["implementation"], f"{times_ours(best, ours):.2f}x") if best else ("", "")
    return f"{name} {which}", mine, who, its, ratio


def op_table(ops: dict[str, list[Duel]]) -> str:
    """Returns a line for each op: its first case, and the ratios of all others."""
    lines = []
    for first, *others in ops.values():
        found = sorted(ratios(others))
        ends = " to ".join(dict.fromkeys(f"{x:.2f}x" for x in (*found[:1], *found[-1:])))
        spread = f"{ends} ({len(found)})" * bool(found)
        lines.append((*summary(*first), f"{first[0]['share']:.0%}", spread))
    header = "op|ours, ms|best peer|its ms|its time / ours|of the limit|all other cases"
    return table(header, lines)


def other_table(rows: list[Record]) -> str:
    """Returns a line for each step, race and generated text, with all implementations' times."""
    lines, kinds = [], ("step/", "race/", "generate/")
    others = (row for row in rows if row["figure"] and row["case"].startswith(kinds))
    for case, group in grouped(others, "case").items():
        group.sort(key=median)
        scale, unit = (1e3, "ms") if median(group[0]) < 1 else (1, "s")
        cells = []
        for row in group:
            name = f"**{row['implementation']}**" if is_ours(row) else row["implementation"]
            loss = f" (loss {row['val_loss'][-1]:.3f})" if "val_loss" in row else ""
            cells.append(f"{name} {three_digits(scale * median(row))}{loss}")
        lines.append((case, unit, ", ".join(cells), group[0]["commit"][:7]))
    return table("case|unit|medians, fastest first|commit", lines)


def plot(devices: dict[str, dict[str, list[Duel]]], path: Path) -> None:
    """Draws the best peer's time over ours for every case of every op, a panel for each device."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    figure = Figure(figsize=(10, 2.6 * len(devices)), layout="constrained")
    panels = figure.subplots(len(devices), squeeze=False)[:, 0]
    for axes, (device, ops) in zip(panels, devices.items()):
        for place, found in enumerate(map(ratios, ops.values())):
            axes.plot([place] * len(found), found, "o", alpha=0.6, color="tab:blue")
        axes.axhline(1, color="grey", linewidth=1)
        axes.set_xticks(range(len(ops)), list(ops), rotation=20, fontsize=7, ha="right")
        axes.set(title=device, yscale="log", ylabel="best peer / ours")
        axes.set_yticks((0.3, 0.5, 1, 2, 4), ("0.3", "0.5", "1", "2", "4"))
        axes.minorticks_off()
        axes.grid(alpha=0.3, axis="y")
    path.parent.mkdir(parents=True, exist_ok=True)
    # no date and no version inside: the same records give the same bytes
    figure.savefig(path, dpi=100, metadata={"Software": None})


def section(device: str, rows: list[Record], ops: dict[str, list[Duel]]) -> str:
    """Returns the tables of one device."""
    last, limits = max(rows, key=lambda row: row["run"]), limits_of(rows)
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    text = f"\n## {device}\n\n{versions}; [records](../bench/results/{records.slug(device)}.jsonl)."
    text += f" Limits of the machine: {limits}." * bool(limits) + "\n"
    if ops:
        found = [round(x, 2) for x in ratios(chain(*ops.values()))]
        faster, slower = sum(x > 1 for x in found), sum(x < 1 for x in found)
        text += (
            f"\nOurs is faster than the best peer in {faster} of {len(found)} cases, as fast in"
            f" {len(found) - faster - slower}, and slower in {slower}.\n\n{op_table(ops)}"
        )
    return text + f"\n{other_table(rows)}"


def write_page(page: Path = PAGE) -> None:
    """Writes the committed records into the page, and the plot beside it."""
    found = grouped((row for row in records.read() if row["on"] in ("cpu", "cuda")), "device")
    ops = {device: duels(found[device]) for device in sorted(found)}
    if drawn := {device: groups for device, groups in ops.items() if groups}:
        plot(drawn, page.with_suffix("") / "ops.png")
    put_into(page, "".join(section(device, found[device], ops[device]) for device in ops))


def publish() -> None:
    """Moves the local records beside the committed ones and writes all into the page."""
    records.publish()
    write_page()
    print(f"wrote {PAGE}")


@dataclass(frozen=True)
class Report:
    """Moves the local records beside the committed ones and renews docs/benchmarks.md."""


def main(argv: list[str]) -> None:
    flags.command(Report, argv, prog="python -m bench.report")
    publish()


if __name__ == "__main__":
    run_command(main)
