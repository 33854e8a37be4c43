"""Tables of records in Markdown for `bench.report`, one function for each kind of record.

A record's columns are written here once, for the page and for the command that measures it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from bench import goals
from bench.goals import ours_and_best_peer, seconds

Row = dict[str, Any]
RACE = "run|seconds|validation loss|nanoGPT's time / this time"
GENERATE = "case|implementation|s (p20, p50, p80)|ms a token"


def grouped(rows: Iterable[Row], *keys: str) -> list[list[Row]]:
    """Returns the rows that agree in all keys, group by group, in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return list(groups.values())


def table(header: str, lines: Iterable[Iterable[str]]) -> str:
    columns = header.split("|")
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def link(row: Row) -> str:
    return f"[record]({row['link']})"


def three_digits(x: float) -> str:
    """Formats a number with three significant digits and no exponent: 0.844, 36.2, 1,040."""
    rounded = float(f"{x:.3g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:g}"


def ms(figures: dict[str, float]) -> str:
    p20, p50, p80 = (three_digits(1e3 * figures[p]) for p in ("p20", "p50", "p80"))
    return f"{p50} ({p20}, {p80})"


def host_us(row: Row) -> str:
    """Formats the host's time of a row; empty on a CPU, where the host is the device."""
    return f"{row['host_s']['p50'] * 1e6:.0f}" if row["on"] == "cuda" else ""


def rate(row: Row) -> str:
    """Formats the rate of an op: FLOPs or bytes, depending on which limits it."""
    if row["bound"] == "matmul":
        return f"{three_digits(row['tflops'])} TFLOP/s"
    return f"{three_digits(row['gb_per_s'])} GB/s"


def gigabytes(row: Row) -> str:
    return f"{row['peak_bytes'] / 1e9:.3g}" if row.get("peak_bytes") is not None else ""


# --- sections -------------------------------------------------------------------------------------


PASSES = ("fwd", "bwd", "both")


def op_table(rows: list[Row], targets: list[goals.Goal]) -> str:
    """Formats one op's measurements: a line for each case and implementation, ours first.

    Host time, rate, limit and memory are those of the last pass that was timed.
    """
    lines = []
    for group in grouped(rows, "case"):
        found = {which: [r for r in group if r["pass"] == which] for which in PASSES}
        leaders = [ours_and_best_peer(found[which]) for which in PASSES]
        for timed in grouped(group, "implementation"):
            last = max(timed, key=lambda row: PASSES.index(row["pass"]))
            ours = leaders[PASSES.index(last["pass"])][0]
            cells = [
                next((_against(row, *pair) for row in timed if row["pass"] == name), "")
                for name, pair in zip(PASSES, leaders, strict=True)
            ]
            lines.append(
                (
                    last["case"].split("/", 1)[1],
                    last["implementation"] + (" †" if "inexact" in last else ""), *cells,
                    host_us(last), rate(last), f"{last['share']:.0%} {last['bound']}",
                    gigabytes(last), distances(last["case"], rows, targets) if last is ours else "",
                    link(last),
                )
            )  # fmt: skip
    times = "|".join(f"{name}, ms" for name in PASSES)
    return table(f"case|implementation|{times}|host us|rate|of limit|peak GB|goals|", lines)


def _against(row: Row, ours: Row | None, best: Row | None) -> str:
    """Formats a time and its ratio to ours; the best peer's in bold."""
    if ours is None or row is ours:
        return ms(row["device_s"])
    ratio = f"{seconds(row) / seconds(ours):.2f}x"
    return f"{ms(row['device_s'])} {f'**{ratio}**' if row is best else ratio}"


def distances(case: str, rows: list[Row], targets: list[goals.Goal]) -> str:
    """Formats the distance of our rows from each goal of a case, or "none set"."""
    said = []
    for goal in targets:
        if goal.case == case:
            result = goals.check_goal(goal, rows)
            found = result.why if result.value is None else f"{result.distance:+.0%}"
            said.append(f"{goal.which} {goal.text}: {found}".strip())
    return "; ".join(said) or "none set"


def step_table(rows: list[Row], targets: list[goals.Goal]) -> str:
    lines = []
    for group in grouped(rows, "case"):
        case = group[0]["case"]
        ours, best = ours_and_best_peer(group)
        for row in group:
            first = f"{row['first_step_s']:.1f}" if "first_step_s" in row else ""
            if not row.get("first_step_alone", True):
                first += ", all at once"
            if "first_step_warm_s" in row:
                first += f", {row['first_step_warm_s']:.1f}"
            dropout = f" dropout {row['dropout']:g}" if row["dropout"] else ""
            lines.append(
                (
                    case.split("/", 1)[1] + dropout,
                    f"**{row['implementation']}**" if row is best else row["implementation"],
                    row["precision"], f"{row['tok_per_s']:,.0f}",
                    ms(row["seconds"]), f"{row['mfu']:.1%}",
                    f"{seconds(row) / seconds(ours):.2f}" if ours else "",
                    gigabytes(row), first,
                    distances(case, rows, targets) if row is ours else "", link(row),
                )
            )  # fmt: skip
    header = (
        "case|trainer|precision|tok/s|ms (p20, p80)|MFU|x ours|peak GB|first step s (cold, warm)|"
        "goals|"
    )
    return table(header, lines)


def parts_table(rows: list[Row]) -> str:
    """Lays out the milliseconds of each part, with the share of its limit where it has one."""
    lines, parts = [], []
    for row in (row for row in rows if "parts" in row):
        cells, parts = [], row["parts"]
        for part, spent in parts.items():
            least = row["limits"][part]
            share = f" ({least / spent:.0%})" if spent and least else ""
            cells.append(f"{spent:.2f}{share}")
        lines.append((row["case"].split("/", 1)[1], row["implementation"], *cells, link(row)))
    return table(f"case|trainer|{'|'.join(parts)}|", lines) if lines else ""


def goal_table(rows: list[Row], targets: list[goals.Goal]) -> str:
    """Lays out every goal of a device, including missed and unmeasured ones."""
    lines = []
    for goal in targets:
        result = goals.check_goal(goal, rows)
        found = (result.why, "", "")
        if result.value is not None:
            reached = "yes" if result.distance >= 0 else "**no**"
            found = (three_digits(result.value), f"{result.distance:+.0%}", reached)
        stretch = "" if goal.stretch is None else f"{goal.stretch:g}"
        lines.append((f"{goal.case} {goal.which}".strip(), goal.text, stretch, *found))
    return table("case|goal|stretch|measured|margin|reached", lines)


def missing_table(rows: list[Row]) -> str:
    """Lists implementations without figures, and why; ops with the same reason share a line."""
    why: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["kind"] in ("missing", "refused"):
            key = (row["implementation"], row["kind"], row["reason"])
            why[key].append(row.get("op") or "step")
    lines = [
        (", ".join(dict.fromkeys(ops)), name, kind, reason.replace("|", "/"))
        for (name, kind, reason), ops in why.items()
    ]
    return table("op|implementation|status|reason", lines) if lines else ""


def other_tables(rows: list[Row]) -> str:
    """Lays out races of whole processes, text generation and data."""
    races, texts, data = ([r for r in rows if r["kind"] == k] for k in ("race", "generate", "data"))
    under: dict[Any, str] = {}  # newest race under each condition
    for row in races:
        under[_condition(row)] = max(under.get(_condition(row), ""), row["run"])
    races = [row for row in races if row["run"] == under[_condition(row)]]
    text = ""
    for title, header, found, cells in (
        ("Whole processes to a loss", f"{RACE}|", races, race_cells),
        ("Text generation", f"{GENERATE}|", texts, generate_cells),
        ("Data", "measurement|result|", data, _data),
    ):
        if found:
            lines = ((*cells(row), link(row)) for row in found)
            text += f"\n### {title}\n\n{table(header, lines)}"
    return text


def _condition(row: Row) -> str:
    """Describes what a race ran under, if not with all instructions of the CPU."""
    isa = row.get("settings", {}).get("isa")
    return f", ONEDNN_MAX_CPU_ISA={isa}" if isa else ""


def race_cells(row: Row) -> tuple[str, ...]:
    """Formats the record of one trainer's runs, in the order of the runs."""
    return (
        row["run_name"] + _condition(row),
        " ".join(f"{s:.1f}" for s in row["seconds"]),
        " ".join(f"{loss:.4f}" for loss in row["val_loss"]),
        " ".join(f"{ratio:.2f}" for ratio in row["nanogpt_over_it"]),
    )


def generate_cells(row: Row) -> tuple[str, ...]:
    """Formats a record of text generation; a token is one of all rows' new tokens."""
    seconds = row["seconds"]
    figures = " ".join(f"{seconds[p]:.2f}" for p in ("p20", "p50", "p80"))
    per_token = 1e3 * seconds["p50"] / (row["tokens"] * len(row["prompts"]))
    return row["case"], row["implementation"], figures, f"{per_token:.1f}"


def _data(row: Row) -> tuple[str, str]:
    if row["case"] != "prepare":
        return row["case"], f"{row['p50']:.0f} million tokens/s"
    ours, alone = (
        f"{min(row[key]):.2f} to {max(row[key]):.2f} s" for key in ("prepare_s", "tiktoken_alone_s")
    )
    return f"prepare {row['megabytes']} MB", f"{ours}; tiktoken alone {alone}"
