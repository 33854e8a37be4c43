"""Writes a page of all records with plots: `python -m bench.report [--publish]`.

The page of local records is `bench/results/local/benchmarks.md`; with `--publish` they are moved
beside the committed ones, and `docs/benchmarks.md` is written. Nothing on the page is typed by
hand. It shows the newest run of each case on a device, with all rows of that one run, and links the
file of each row.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import goals, plots, records, tables
from bench.goals import ours_and_best_peer, seconds
from bench.tables import Row
from fastgpt import flags
from fastgpt.errors import UserError, run_command

DOCS = Path(__file__).parents[1] / "docs"
OURS = ("ours", "all")
"""Implementations that count as ours in a record of a refusal; `all`: the whole case failed."""
SHOWN = ("op", "step", "missing", "refused", "race", "generate", "data", "tune")
"""Kinds of records for which a device has a section on the page."""
HEAD = """# Benchmarks

`python -m bench.report --publish` writes this page from the raw records that `make bench` and
`make gpu` leave in bench/results. Nothing on it is typed by hand, and each row links its record.
"""
NOTES = """
## How to read the tables

- **ours** is fastgpt's implementation: the kernel on a GPU, and on a CPU the function that the
  model calls there. **eager** is the same computation by PyTorch's own ops, without a compiler. The
  **best peer** is the fastest implementation other than ours; its name or ratio is in bold.
- **x**: the other implementation's time divided by ours, so above 1x ours is faster.
- A **case** is an op, its sizes and its dtype, as in `attention/gpt2-124m/bf16`, or a training step
  of a recipe, where `B=24` means 24 sequences per step. **fwd** is the forward, **bwd** the
  backward, and **both** is one after the other. A loss may compute its gradient in the forward, so
  compare `both`; host time, rate, limit and memory of a line are those of `both`, if it was timed.
- **Share of the limit** (also "of limit"): the time that the measured matmul rate or copy bandwidth
  of that run allows, divided by the time taken. For a training step it is the MFU. On a CPU, whose
  caches are warm, small cases can exceed 100 %.
- Times are medians, with the 20th and 80th percentiles in brackets. The implementations of a case
  took turns in one run; `bench/timing.py` describes how they were timed.
- **Whole processes**: each list is in the order of the runs. Each ratio compares two runs of one
  round.
- **Goals** are set in `bench/goals.toml`. The **margin** is the distance from the goal: positive is
  better than the goal. **Stretch** is a harder goal, for information.
- Attention counts 4 B H T² D FLOPs forward, half of it if causal, and 2.5 times that backward.
- An implementation is timed only if its outputs and gradients keep the tolerance of the tests
  (`kernels/parity.py`). † marks a peer whose error is larger, but at most 2 %.
"""
GUIDE = "[How to read the table](../benchmarks.md#how-to-read-the-tables)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Writes a page with tables and plots of all records."""

    publish: bool = False
    """Move the local records beside the committed ones and write docs/benchmarks.md.

    Without it, the page is bench/results/local/benchmarks.md and has only the local records.
    """


def newest(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of each case from the newest run that measured it."""
    runs: dict[str, str] = {}
    rows = [row for row in rows if "case" in row]
    for row in rows:
        if row["kind"] in ("op", "step", "generate"):
            runs[row["case"]] = max(runs.get(row["case"], ""), row["run"])
    return [row for row in rows if row["run"] == runs.get(row["case"], row["run"])]


# --- the document ---------------------------------------------------------------------------------


def summary(ops: list[Row], steps: list[Row]) -> str:
    """Lays out a line for each op and training step: ours, the best peer, share of the limit."""
    lines, ratios = [], []
    for groups in (tables.grouped(steps, "case"), typical(ops)):
        for group in groups:
            ours, best = ours_and_best_peer(group)
            if ours is None:
                continue
            share = f"{ours['share']:.0%}" if "share" in ours else f"{ours['mfu']:.0%} (MFU)"
            name = ours["case"] + (f" {ours['pass']}" if "pass" in ours else "")
            against = ("", "", "")
            if best:
                ratios.append(round(seconds(best) / seconds(ours), 2))
                its_ms = tables.three_digits(seconds(best) * 1e3)
                against = (best["implementation"], its_ms, f"{ratios[-1]:.2f}x")
            lines.append((name, tables.three_digits(seconds(ours) * 1e3), *against, share))
    header = "case|ours, ms|best peer|its ms|its time / ours|share of the limit"
    return f"{_standing(ratios)}\n{tables.table(header, lines)}" if lines else ""


def _standing(ratios: list[float]) -> str:
    """Counts the rows in which ours is faster than the best peer, as fast, and slower."""
    faster, slower = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
    same = len(ratios) - faster - slower
    return (
        f"Ours is faster than the best peer (above 1x) in {faster} of {len(ratios)} rows, as fast"
        f" in {same}, and slower (below 1x) in {slower}.\n"
    )


def typical(rows: list[Row]) -> list[list[Row]]:
    """Returns the rows of each op's first case, of `both` if it was timed, else the forward's."""
    found = []
    for group, *_ in (tables.grouped(rows, "case") for rows in tables.grouped(rows, "op")):
        passes = {row["pass"] for row in group}
        found.append([r for r in group if r["pass"] == ("both" if "both" in passes else "fwd")])
    return found


def section(device: str, rows: list[Row], folder: Path) -> str:
    """Writes the section of one device; the cases of its ops have a page in `folder`."""
    shown = newest(rows)
    slug = records.slug(device)
    on = rows[0]["on"]
    # goals without a device are for CPUs; those for GPUs name theirs
    targets = [g for g in goals.read() if g.device in slug and (g.device or on == "cpu")]
    versions = next((row["versions"] for row in reversed(rows)), {})
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    text = f"\n## {device}\n\nNewest record: {said}; driver {rows[-1].get('driver') or 'none'}.\n"
    ops, steps = ([r for r in shown if r["kind"] == kind] for kind in ("op", "step"))
    machine = [row for row in rows if row["kind"] == "machine"]
    if machine:
        units = {name: "GB/s" if name == "copy" else "GFLOP/s" for name in machine[-1]["rates"]}
        rates = ", ".join(f"{n} {machine[-1]['rates'][n] / 1e9:,.0f} {u}" for n, u in units.items())
        text += f"Measured limits of the machine: {rates} ({tables.link(machine[-1])}).\n"
    text += f"\n{summary(ops, steps)}"
    if targets:
        text += "\n### Goals\n\n" + tables.goal_table([*ops, *steps], targets)
    if steps:
        text += "\n### Training step\n\n" + tables.step_table(steps, targets)
        text += f"\nMFU: {steps[-1]['mfu_convention']}. Milliseconds by part (limit / time):\n\n"
        text += tables.parts_table(steps) + plots.of_steps(steps, folder, slug)
    if ops:
        text += "\n### Roofline\n\n" + plots.roofline(ops, folder, slug)
        page = folder / f"{slug}.md"
        content = f"# Ops on {device}\n\n{GUIDE}\n"
        names = []
        for group in tables.grouped(ops, "op"):
            names.append(group[0]["op"])
            mine = [{**row, "link": os.path.relpath(row["path"], folder)} for row in group]
            content += f"\n## {names[-1]}\n\n{tables.op_table(mine, targets)}"
        page.write_text(content, encoding="utf-8")
        links = (f"[{op}](benchmarks/{page.name}#{op})" for op in names)
        text += f"\n### Ops\n\nEvery case and pass of {', '.join(links)}.\n"
    if absent := tables.missing_table(shown):
        text += f"\n### Not measured\n\n{absent}"
    text += tables.other_tables(rows)
    if links := sorted({row["link"] for row in rows if row["kind"] == "tune"}):
        files = ", ".join(f"[{Path(link).name}]({link})" for link in links)
        text += f"\nRecords of `make tune`: {files}.\n"
    return text


def write(results: Path, docs: Path) -> Path:
    """Writes `docs/benchmarks.md` and its plots from the records in `results`; returns its path."""
    rows = records.read(results)
    for row in rows:
        row["link"] = os.path.relpath(row["path"], docs)
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    text = HEAD + (NOTES if rows else "\nThere are no records yet.\n")
    for device in sorted({row["device"] for row in rows if row["kind"] in SHOWN}):
        text += section(device, [row for row in rows if row["device"] == device], folder)
    path = docs / "benchmarks.md"
    path.write_text(text, encoding="utf-8")
    return path


def write_local() -> Path:
    """Writes the page of the unpublished records."""
    local = records.RESULTS / records.LOCAL
    return write(local, local)


def publish() -> Path:
    """Publishes the local records and writes `docs/benchmarks.md` from all.

    Raises:
        UserError: a local record says that an op of ours was refused a time.
    """
    for row in records.read(records.RESULTS / records.LOCAL):
        if row["kind"] == "refused" and row["implementation"] in OURS:
            raise UserError(f"{row['path']} is not published: {row['case']}: {row['reason']}")
    records.publish()
    return write(records.RESULTS, DOCS)


def main(argv: list[str]) -> None:
    report = flags.parse(Report, argv, prog="python -m bench.report")
    print(publish() if report.publish else write_local())


if __name__ == "__main__":
    run_command(main)
