"""Rules that every compiled kernel must keep, and the comparison of two reports of kernels."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..runtime import family
from .compile import CompileResult

TUNED = (80, 90, 100)
"""Archs with attention tables of their own."""
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory a block can have: CUDA C++ Programming Guide, compute capabilities."""
ARCHS = tuple(SHARED_LIMIT)
MAY_WAIT = re.compile(
    r"float32|D=256|sm_90 \S+dkv_kernel D=64 \w+ docs|sm_100 \S+fwd_kernel D=(80|128 \w+ docs)"
    r"|sm_100 \S+dkv_kernel D=(16|32|64 \w+ docs|80|128)"
)
"""Variants on TUNED archs whose loops may wait for a load that they have just asked for: one more
stage spills (with Triton 3.6 or 3.7), does not fit, or leaves room for one block less."""
KINDS = {
    "compile": "kernels that are gone",
    "limits": "rules that every kernel must keep",
    "fault": "faults of executed problems",
    "tolerance": "errors beyond the tolerance",
    "bits": "results that differ in their bits",
    "fences": "fences, waits or barriers",
    "registers": "registers",
    "shared": "shared or tensor memory",
    "instructions": "instructions",
    "ceiling": "static ceiling: thread blocks on a multiprocessor, clocks of the main loops",
}
Report = Mapping[str, Any]
"""Result of `report.report`: the kernels of one commit with one version of Triton."""


COSTS = {"compile", "bits", "fences", "registers", "shared", "instructions", "ceiling"}
"""Kinds that a commit may accept."""


def wrong(row: CompileResult) -> list[str]:
    """Lists the rules that a compiled variant breaks."""
    if row.error:
        return [f"does not compile: {row.error}"]
    problems = []
    if row.spilled:
        problems.append(f"spills {row.spilled} bytes")
    if row.shared > (limit := SHARED_LIMIT[family(row.arch)]):
        problems.append(f"{row.shared} bytes of shared memory > {limit}")
    if row.declared and not any(name.startswith(row.declared) for name in row.mma):
        problems.append(f"has no {row.declared}")
    if row.waits and row.arch in TUNED and not MAY_WAIT.search(row.key):
        problems.append("waits for a load that it has just asked for")
    return problems


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference of one compiled variant or executed problem between two reports."""

    name: str
    kind: str
    text: str
    worse: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}: {self.text}"


def compare(old: Report, new: Report, growth: float = 0.0) -> list[Finding]:
    """Lists what differs between two reports.

    Args:
        growth: share by which registers, memory, instructions and clocks may grow. If it is 0,
            another bit of a result is worse, too.
    """
    found = []
    for part, differ in (("forms", _form), ("results", _result)):
        a, b = old[part], new[part]
        for name in sorted(a.keys() | b.keys()):
            if name in b:
                found += [Finding(name, *each) for each in differ(a.get(name), b[name], growth)]
            elif part == "forms":
                found.append(Finding(name, "compile", "is gone", True))
    return found


Found = Iterator[tuple[str, str, bool]]


def _form(old: Report | None, new: Report, growth: float) -> Found:
    comparable = old is not None and not old["error"] and not new["error"]
    # spills and waits are compared below
    known = [*(old["problems"] if old else ()), *(("spills", "waits") if comparable else ())]
    for text in new["problems"]:
        if not text.startswith(tuple(known)):
            yield "limits", text, True
    if old is not None and comparable:
        yield from _costs(old, new, growth)


def _costs(old: Report, new: Report, growth: float) -> Found:
    for kind, name in (
        ("limits", "spilled"), ("limits", "waits"), ("registers", "registers"),
        ("shared", "shared"), ("shared", "columns"), ("instructions", "instructions"),
        ("ceiling", "clocks"),
    ):  # fmt: skip
        if (a := old[name]) != (b := new[name]):
            more = _changed(old["units"], new["units"]) if kind == "instructions" else ""
            yield kind, f"{name} {a} -> {b}{more and f' ({more})'}", b > a * (1 + growth)
    if (a := old["blocks"]) != (b := new["blocks"]):
        yield "ceiling", f"thread blocks on a multiprocessor {a} -> {b}", b < a
    if old["mma"] != new["mma"]:
        lost = bool(old["mma"].keys() - new["mma"].keys())
        yield "limits", f"products by {_changed(old['mma'], new['mma'])}", lost
    if old["fences"] != new["fences"]:
        a, b = (each["fences"].get("fence.proxy.async", 0) for each in (old, new))
        # another Triton may need fewer, but not none
        yield "fences", _changed(old["fences"], new["fences"]), b < a and (growth == 0 or b == 0)


def _changed(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """Returns "bar.sync 3 -> 2, ..." for the counts that differ."""
    both = {name: (old.get(name, 0), new.get(name, 0)) for name in sorted(old.keys() | new.keys())}
    return ", ".join(f"{name} {a} -> {b}" for name, (a, b) in both.items() if a != b)


def _result(old: Report | None, new: Report, growth: float) -> Found:
    old = old or {"fault": "", "wrong": [], "digests": {}, "errors": {}}
    if old["fault"] or new["fault"]:
        if old["fault"] != new["fault"]:
            yield "fault", new["fault"] or "fault is gone", bool(new["fault"])
        return
    if unheard := [text for text in new["wrong"] if text not in old["wrong"]]:
        yield "tolerance", "; ".join(unheard), True
    both = old["digests"].keys() & new["digests"].keys()
    if names := sorted(name for name in both if old["digests"][name] != new["digests"][name]):
        pairs = ((name, old["errors"][name], new["errors"][name]) for name in names)
        text = ", ".join(f"{name} (error {a:.2e} -> {b:.2e})" for name, a, b in pairs)
        yield "bits", text, growth == 0


def show(found: list[Finding], accepted: list[str] | None = None) -> int:
    """Prints findings, and how many of each kind there are; returns the number that are worse.

    Args:
        accepted: parts of findings that do not count as worse, if they are of COSTS.
    """
    same = [f for f in found if not f.worse]
    meant = [
        f for f in found
        if f.worse and f.kind in COSTS and any(text in str(f) for text in accepted or ())
    ]  # fmt: skip
    worse = [f for f in found if f.worse and f not in meant]
    for mark, some in (("", same), ("accepted ", meant), ("WORSE ", worse)):
        for f in some:
            print(f"{mark}{f}")
    all_, bad = Counter(f.kind for f in found), Counter(f.kind for f in worse)
    lines: list[tuple[str, ...]] = [("what", "differ", "worse")]
    lines += [(KINDS[kind], str(n), str(bad[kind])) for kind, n in sorted(all_.items())]
    print(aligned(lines))
    return len(worse)


def aligned(lines: list[tuple[str, ...]]) -> str:
    """Formats rows of cells as columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines)
