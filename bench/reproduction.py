"""What was published of each system, and the page that sets what was measured beside it."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastgpt.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A published loss, in nats a token."""

    step: int
    published: float
    band: float = 0.05
    """How far off it may be: other random numbers move each loss by some hundredths."""
    key: str = "val_loss"
    """Of the run's metrics: `val_loss`, the mean over 200 random batches, or `train_loss`, one."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A rung of the lecture's ladder."""

    letter: str
    recipe: str
    about: str
    targets: tuple[Target, ...]
    seeds: tuple[int, ...] = (1337, 1, 2)
    """One run each: the mean of their losses is what is held to the band."""
    on_cpu: bool = True
    """Whether two cores train it in minutes."""


SYSTEMS = (
    System(
        letter="A", recipe="lecture-bigram", about="a table of bigrams",
        targets=(
            Target(step=10_100, published=2.49, note="the notes print no validation loss; 2.49 is "
                   "what other runs of these settings gave"),
            # single batches scatter by 0.07
            Target(step=10_100, published=2.45, band=0.15, key="train_loss", note="one batch"),
        ),
    ),
    System(
        letter="B", recipe="lecture-head", about="one attention head",
        targets=(Target(step=1000, published=2.5303), Target(step=4500, published=2.4084)),
    ),
    System(
        letter="C", recipe="lecture-multihead", about="four heads",
        targets=(Target(step=4500, published=2.2858),),
    ),
    System(
        letter="D", recipe="lecture-feedforward", about="and a feed-forward layer",
        targets=(Target(step=4500, published=2.2411),),
    ),
    System(
        letter="E", recipe="lecture-residual", about="three blocks, residual",
        targets=(Target(step=4500, published=2.1174),),
    ),
    System(
        letter="F", recipe="lecture-layernorm", about="and LayerNorm",
        targets=(Target(step=4500, published=2.0819),),
    ),
    System(
        letter="H", recipe="lecture-gpt-small", about="a GPT, 4 layers of 64",
        seeds=(1337,),
        targets=(Target(step=5000, published=1.82, note="from the lecture's own run"),),
    ),
    System(
        letter="G", recipe="lecture-gpt", about="a GPT, 6 layers of 192, dropout",
        seeds=(1337,),
        targets=(Target(step=1000, published=1.7604), Target(step=2000, published=1.5939)),
    ),
    System(
        letter="G'", recipe="lecture-gpt-full", about="the same of 384, context 256", on_cpu=False,
        seeds=(1337,),
        targets=(Target(step=5000, published=1.48, note="not in the notes themselves"),),
    ),
)  # fmt: skip

BEGIN, END = "<!-- written by bench.reproduce -->", "<!-- to here -->"
"""What is between them on the page comes from the records, the rest is written by hand."""


def put_into(page: str, table: str) -> str:
    """`page` with `table` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UserError(f"the page has no {BEGIN} followed by {END}: expected both")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def render(runs: dict[str, list[dict[str, Any]]]) -> str:
    """The table; `runs` are the records of each system, and what has none is said to have none."""
    columns = ("system", "step", "published", "measured", "band", "inside", "seconds", "command")
    rows = [row for rows in runs.values() for row in rows]
    lines = [*_machines(rows), f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    notes: list[str] = []
    for system in SYSTEMS:
        lines += _lines(system, runs.get(system.letter, []), notes)
    lines += ["", *notes]
    if rows:
        minutes = sum(row["seconds"] for row in rows) / 60
        lines += ["", f"In all {minutes:.1f} minutes, whole processes."]
    return "\n".join(lines) + "\n"


def _machines(rows: list[dict[str, Any]]) -> list[str]:
    found = {
        f"On {row['device']}; PyTorch {row['versions']['torch']}, commit {row['commit']}."
        for row in rows
    }
    return [*sorted(found), ""] if found else []


def _lines(system: System, rows: list[dict[str, Any]], notes: list[str]) -> Iterator[str]:
    """One for each target."""
    name = f"{system.letter}: {system.about}"
    seconds = " + ".join(f"{row['seconds']:.0f}" for row in rows) or "-"
    command = f"`{rows[0]['command']}`" if rows else f"`python train.py {system.recipe}`"
    for target in system.targets:
        published, band = f"{target.published:.4f}".rstrip("0"), f"±{target.band}"
        if target.note:
            notes.append(f"{len(notes) + 1}. {target.note}")
            published += f" ({len(notes)})"
        key = f"{target.key} {target.step}"
        found = [row["measured"][key] for row in rows if key in row["measured"]]
        measured, inside = _judged(target, found)
        if rows and not found:
            measured = f"{rows[0]['config']['steps']:,} steps run so far"
        cells = (name, f"{target.step:,}", published, measured, band, inside, seconds, command)
        yield f"| {' | '.join(cells)} |"


def _judged(target: Target, found: list[float]) -> tuple[str, str]:
    """The mean, with the lowest and highest where there are several, and whether it is inside."""
    if not found:
        return "not run yet", "-"
    mean = statistics.fmean(found)
    inside = "yes" if abs(mean - target.published) <= target.band else "**no**"
    if len(found) == 1:
        return f"{mean:.4f}", inside
    return f"{mean:.4f} ({min(found):.4f} to {max(found):.4f})", inside
