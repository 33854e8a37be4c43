"""Plots of the report, as PNG; each function returns the Markdown that shows its picture."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # without pyplot: no display is looked for

from bench.tables import Row


def _save(figure: Figure, folder: Path, name: str, title: str) -> str:
    # no date and no version inside: the same records give the same bytes
    figure.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
    return f"![{title}](benchmarks/{name}.png)\n"


def _tidy(axes: Any, **labels: str) -> None:
    axes.set(**labels)
    axes.grid(alpha=0.3)


def roofline(rows: list[Row], folder: Path, slug: str) -> str:
    """Draws matmul-bound ops on the roofline, memory-bound ones as a share of the copy's rate."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in rows if _apart(row)]
    products = [row for row in rows if row["flops"]]
    for who in dict.fromkeys(row["implementation"] for row in products):
        mine = [row for row in products if row["implementation"] == who]
        intensity = [row["flops"] / row["bytes"] for row in mine]
        marker = "o" if who == "ours" else "x"
        left.plot(intensity, [row["tflops"] for row in mine], marker, label=who)
    if products:
        _draw_peaks(left, products)
        left.legend(fontsize=7)
    left.set(xscale="log", yscale="log")
    _tidy(left, xlabel="FLOPs a byte", ylabel="TFLOP/s", title="products")
    memory = [row for row in rows if not row["flops"]]
    places = list(dict.fromkeys((r["op"], r["case"], r["pass"]) for r in memory))
    for who in dict.fromkeys(row["implementation"] for row in memory):
        mine = [row for row in memory if row["implementation"] == who]
        x = [places.index((r["op"], r["case"], r["pass"])) for r in mine]
        marker = "o" if who == "ours" else "x"
        right.plot(x, [100 * r["share"] for r in mine], marker, label=who)
    if memory:
        firsts = {place[0]: i for i, place in reversed(list(enumerate(places)))}
        right.set_xticks(list(firsts.values()), list(firsts), rotation=20, fontsize=8, ha="right")
        right.legend(fontsize=7)
    _tidy(right, ylabel="% of copy bandwidth", title="memory")
    return _save(figure, folder, f"{slug}-roofline", "roofline")


def _apart(row: Row) -> bool:
    """Returns True for the rows to plot: forward and backward apart, for losses both together."""
    return (row["pass"] == "both") == row["op"].endswith("cross_entropy")


def _draw_peaks(axes: Any, rows: list[Row]) -> None:
    """Draws the roofline: the highest FLOP/s that bandwidth and matrix products allow."""
    intensity = [row["flops"] / row["bytes"] for row in rows]
    low, high = min(intensity) / 2, max(intensity) * 2
    for matmul, copy in {(row["roof"]["matmul"], row["roof"]["copy"]) for row in rows}:
        knee = matmul / copy
        x = [min(low, knee), knee, max(high, knee)]
        axes.plot(x, [min(matmul, copy * i) / 1e12 for i in x], color="grey", linewidth=1)


def of_steps(rows: list[Row], folder: Path, slug: str) -> str:
    """Draws each implementation's tokens per second, and the time of its step by kind of kernel."""
    figure = Figure(figsize=(11, 0.6 + 0.4 * max(len(rows), 4)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [f"{r['case'].split('/', 1)[1]} {r['implementation']}" for r in rows]
    left.barh(range(len(rows)), [r["tok_per_s"] for r in rows])
    left.set_yticks(range(len(rows)), names, fontsize=7)
    _tidy(left, xlabel="tok/s")
    reached = [0.0] * len(rows)
    parts = next((row["parts"] for row in rows if "parts" in row), {})
    for part in parts:
        spent = [row.get("parts", {}).get(part, 0.0) for row in rows]
        right.barh(range(len(rows)), spent, left=reached, label=part)
        reached = [a + b for a, b in zip(reached, spent)]
    if parts:
        right.legend(fontsize=7)
    right.invert_yaxis()
    _tidy(right, xlabel="ms of a step")
    return "\n" + _save(figure, folder, f"{slug}-step", "training step")
