"""Reads the goals of `goals.toml` and computes how far the records are from each."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOALS = Path(__file__).with_name("goals.toml")
Rows = Iterable[dict[str, Any]]
AT_MOST = {
    "ms": "{:,g} ms",
    "host_us": "{:,g} us of the host",
    "gb": "{:,g} GB",
    "memory_ratio": "{:,g} of {peer}'s memory",
}
AT_LEAST = {
    "ratio": "{:,g} x {peer}'s speed",
    "share": "{:,g} of a copy's speed",
    "tok_per_s": "{:,g} tokens/s",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """A performance goal for a case, whose `kind` is a key of AT_MOST or AT_LEAST."""

    case: str
    which: str
    device: str
    peer: str
    kind: str
    target: float
    stretch: float | None

    @property
    def text(self) -> str:
        bound = "at most" if self.kind in AT_MOST else "at least"
        form = {**AT_MOST, **AT_LEAST}[self.kind]
        return f"{bound} {form.format(self.target, peer=self.peer)}"


@dataclass(frozen=True, slots=True)
class GoalResult:
    """The measured figure of a goal, or None and the reason why there is none."""

    value: float | None
    distance: float
    """Relative distance from the goal; positive means better than the goal."""
    why: str = ""


def read(path: Path = GOALS) -> list[Goal]:
    """Reads every goal.

    Raises:
        ValueError: a goal has no kind, or two.
    """
    goals = []
    for table in tomllib.loads(path.read_text())["goal"]:
        kinds = [kind for kind in (*AT_MOST, *AT_LEAST) if kind in table]
        if len(kinds) != 1:
            raise ValueError(f"{path}: expected one kind of goal, got {kinds} in {table}")
        which, device, peer = (table.get(key, "") for key in ("pass", "device", "peer"))
        target, stretch = table[kinds[0]], table.get("stretch")
        goals.append(Goal(table["case"], which, device, peer, kinds[0], target, stretch))
    return goals


def seconds(row: dict[str, Any]) -> float:
    return row["seconds" if row["kind"] == "step" else "device_s"]["p50"]


def check_goal(goal: Goal, rows: Rows) -> GoalResult:
    """Returns whether a benchmark run meets a goal, given the rows that the run recorded."""
    rows = [r for r in rows if r["case"] == goal.case and r.get("pass", "") == goal.which]
    best = min((r for r in rows if is_ours(r)), key=seconds, default=None)
    peer = next((r for r in rows if r["implementation"] == goal.peer), None)
    if best and goal.peer and peer is None:
        return GoalResult(None, 0.0, f"{goal.peer} cannot run here")
    value = _value(goal.kind, best, peer) if best else None
    if value is None:
        return GoalResult(None, 0.0, "not measured")
    ratio = goal.target / value if goal.kind in AT_MOST else value / goal.target
    return GoalResult(value, ratio - 1)


def is_ours(row: dict[str, Any]) -> bool:
    """Returns True for a row of our op or of one of fastgpt's training steps."""
    return row["implementation"] == "ours" or row["implementation"].startswith("fastgpt")


def ours_and_best_peer(rows: Rows) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Returns our fastest row and the fastest of all others; None where there is none."""
    mine = {True: [], False: []}
    for row in rows:
        mine[is_ours(row)].append(row)
    ours, best = (min(mine[which], key=seconds, default=None) for which in (True, False))
    return ours, best


def _value(kind: str, ours: dict[str, Any], peer: dict[str, Any] | None) -> float | None:
    peak, of_peer = (row.get("peak_bytes") for row in (ours, peer or {}))
    match kind:
        case "ratio":
            return seconds(peer or ours) / seconds(ours)
        case "memory_ratio":
            return peak / of_peer if peak and of_peer else None
        case "gb":
            return None if peak is None else peak / 1e9
        case "share":
            return ours["bytes"] / seconds(ours) / ours["roof"]["copy"]
        case "host_us":
            return ours["host_s"]["p50"] * 1e6
        case "ms":
            return seconds(ours) * 1e3
    return ours[kind]
