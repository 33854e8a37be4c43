"""Judges an upgrade of Triton: compiles and executes our kernels with both versions, and compares.

    python -m kernels.upgrade --to 3.9 [--from 3.7.1] [--brief] [--arch 80 90] [--op norm]

Each version is installed into a folder of its own, without dependencies, and a process that imports
it from there writes what it makes of our kernels (`kernels.proof.census`). In place of a version
the path of such a file may be given, as FILE.json. Compared are, form by form: whether it compiles,
registers, spills, shared memory, instructions by kind, fences and barriers, the static ceiling
(thread blocks on a multiprocessor, clocks of the main loops), and of executed problems faults,
errors beyond the tolerance, and the bits of the results.

The exit status is 0 if nothing is worse, 1 if something is, 2 if nothing could be compared. Worse
are: a form that does not compile any more, a fault, an error beyond the tolerance, a spill, a limit
that is passed, no proxy fence where there was one, fewer thread blocks on a multiprocessor, lost
tensor-core instructions, and growth by more than a tenth. Other differences are counted. A full run
takes about half an hour of one core for each version and arch, --problems 3 ten minutes, --brief
one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .aot import ARCHS, aligned
from .runtime import family

GROWTH = 0.1
"""Share by which a resource may grow; a change of speed shows in the ceiling."""
KINDS = {
    "compile": "forms that compile with one version alone",
    "fault": "faults of executed problems",
    "tolerance": "errors beyond the tolerance",
    "bits": "results that differ in their bits",
    "fences": "fences, waits or barriers",
    "registers": "registers, or spills",
    "shared": "shared or tensor memory",
    "instructions": "instructions",
    "ceiling": "static ceiling: thread blocks on a multiprocessor, clocks of the main loops",
}
HEAD = """# Upgrades of Triton

Written by `python -m kernels.upgrade --to 3.9 --record`; do not edit.

Each section compares what two versions make of the kernels. A form is a kernel with the dtypes,
sizes and options of one launch, compiled for one GPU architecture. Which differences count as
worse, `python -m kernels.upgrade --help` says.
"""
"""Text above the sections of `docs/upgrades.md`."""
RECORD = Path(__file__).parent / "proof" / "upgrades.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "upgrades.md"
Report = Mapping[str, Any]


class BadUsageError(Exception):
    """Two versions cannot be compared, for a reason that the message gives."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference of one form or executed problem between two versions."""

    form: str
    kind: str
    text: str
    worse: bool


# --- compare --------------------------------------------------------------------------------------


def compare(old: Report, new: Report) -> list[Finding]:
    """Lists what differs between two reports of `kernels.proof.census`."""
    found = []
    for part, differ in (("forms", _form), ("results", _result)):
        a, b = old[part], new[part]
        for name in sorted(a.keys() | b.keys()):
            if name not in a or name not in b:
                where = old if name in a else new
                found.append(Finding(name, "compile", f"only with {where['triton']}", True))
            else:
                found += [Finding(name, *rest) for rest in differ(a[name], b[name])]
    return found


def _grown(old: float, new: float) -> bool:
    return new > old * (1 + GROWTH)


def _form(old: Report, new: Report) -> Iterator[tuple[str, str, bool]]:
    if "error" in old or "error" in new:
        if "error" not in old:
            yield "compile", f"no longer compiles: {new['error']}", True
        elif "error" not in new:
            yield "compile", "compiles now", False
        return
    for kind, name in (
        ("registers", "registers"), ("shared", "shared"), ("shared", "columns"),
        ("instructions", "instructions"),
    ):  # fmt: skip
        if (a := old[name]) != (b := new[name]):
            more = _changed(old["units"], new["units"]) if kind == "instructions" else ""
            yield kind, f"{name} {a} -> {b}{more and f' ({more})'}", _grown(a, b)
    yield from _limits(old, new)
    yield from _ceiling(old, new)


def _limits(old: Report, new: Report) -> Iterator[tuple[str, str, bool]]:
    if old["spilled"] != new["spilled"]:
        grows = new["spilled"] > old["spilled"]
        yield "registers", f"spilled bytes {old['spilled']} -> {new['spilled']}", grows
    known = [*old["problems"], *(text for text in new["problems"] if text.startswith("spills"))]
    if limits := [text for text in new["problems"] if text not in known]:
        shared = "shared memory" in limits[0]
        yield "shared" if shared else "instructions", "; ".join(limits), True
    if old["mma"].keys() != new["mma"].keys():
        lost = bool(old["mma"].keys() - new["mma"].keys())
        yield "instructions", f"products by {_changed(old['mma'], new['mma'])}", lost
    if old["fences"] != new["fences"]:
        proxy = "fence.proxy.async"
        lost = proxy in old["fences"] and proxy not in new["fences"]
        yield "fences", _changed(old["fences"], new["fences"]), lost


def _ceiling(old: Report, new: Report) -> Iterator[tuple[str, str, bool]]:
    if (a := old["blocks"]) != (b := new["blocks"]):
        yield "ceiling", f"thread blocks on a multiprocessor {a} -> {b}", b < a
    if (a := old["clocks"]) != (b := new["clocks"]):
        yield "ceiling", f"clocks of the main loops {a} -> {b}", _grown(a, b)


def _changed(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """Returns "bar.sync 3 -> 2, ..." for the counts that differ."""
    both = {name: (old.get(name, 0), new.get(name, 0)) for name in sorted(old.keys() | new.keys())}
    return ", ".join(f"{name} {a} -> {b}" for name, (a, b) in both.items() if a != b)


def _result(old: Report, new: Report) -> Iterator[tuple[str, str, bool]]:
    if "fault" in old or "fault" in new:
        if old.get("fault") != new.get("fault"):
            yield "fault", new.get("fault", "fault is gone"), "fault" in new
        return
    if wrong := [text for text in new["wrong"] if text not in old["wrong"]]:
        yield "tolerance", "; ".join(wrong), True
    names = [name for name, bits in old["digests"].items() if new["digests"].get(name) != bits]
    if names:
        pairs = ((name, old["errors"][name], new["errors"].get(name, 0.0)) for name in names)
        text = ", ".join(f"{name} (error {a:.2e} -> {b:.2e})" for name, a, b in pairs)
        yield "bits", text, False


# --- run ------------------------------------------------------------------------------------------


def installed_into(folder: Path, release: str) -> Path:
    """Returns the folder of a version of Triton, which pip downloads unless it is there."""
    target = folder / f"triton-{release}"
    if not (target / "triton" / "__init__.py").exists():
        exact = release if release.count(".") > 1 else f"{release}.*"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        print(f"installing triton=={exact} into {target}", flush=True)
        if subprocess.run([*pip, f"triton=={exact}"]).returncode:
            raise BadUsageError(f"pip cannot install triton=={exact}; expected a released version")
    return target


def report_of(release: str, args: argparse.Namespace) -> Report:
    """Runs the census with a version of Triton, or reads the one that was named."""
    if release.endswith(".json"):
        if not Path(release).is_file():
            raise BadUsageError(
                f"{release} does not exist: expected a report of kernels.proof.census"
            )
        return json.loads(Path(release).read_text(encoding="utf-8"))
    target = installed_into(args.folder, release).resolve()
    out = (args.folder / f"{release}{'-brief' * args.brief}.json").resolve()
    out.unlink(missing_ok=True)
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    asked = ["--out", str(out), "--jobs", str(args.jobs), *["--brief"] * args.brief]
    for name in ("arch", "op", "modules", "problems"):
        if values := getattr(args, name):
            asked += [f"--{name}", *map(str, values if isinstance(values, list) else [values])]
    print(f"Triton {release}", flush=True)
    command = [sys.executable, "-m", "fastgpt.kernels.proof.census", *asked]
    if subprocess.run(command, env=environment).returncode or not out.exists():
        raise BadUsageError(f"the kernels do not run with Triton {release}: see above")
    return json.loads(out.read_text(encoding="utf-8"))


# --- show -----------------------------------------------------------------------------------------


def summary(old: Report, new: Report, found: list[Finding]) -> dict[str, Any]:
    """Returns what is recorded of a comparison."""
    all_, worse = Counter(f.kind for f in found), Counter(f.kind for f in found if f.worse)
    archs = {name.split()[0] for part in ("forms", "results") for name in new[part]}
    return {
        "archs": sorted(archs, key=lambda arch: int(arch[3:])),
        "forms": len(new["forms"]),
        "results": len(new["results"]),
        "kinds": {kind: [all_[kind], worse[kind]] for kind in KINDS},
        "worse": [f"{f.form}: {f.kind}: {f.text}" for f in found if f.worse],
    }


def summary_line(record: Mapping[str, Any]) -> str:
    """Returns "yes" or "no" with the reason, of a comparison's `summary`."""
    if worse := len(record["worse"]):
        return f"no, {worse} {'is' if worse == 1 else 'are'} worse"
    if changes := sum(n for n, _ in record["kinds"].values()):
        return f"yes, nothing is worse ({changes} {'differs' if changes == 1 else 'differ'})"
    return "yes, nothing differs"


def page(records: Mapping[str, Any]) -> str:
    """Returns docs/upgrades.md: what each recorded comparison found."""
    lines = [HEAD.rstrip()]
    for pair, record in records.items():
        lines += ["", f"## {pair}", ""]
        said = f"**Upgrade? {summary_line(record)[0].upper()}{summary_line(record)[1:]}.**"
        lines += [f"{said} {record['forms']} forms compiled, {record['results']} problems executed "
                  f"on a CPU ({', '.join(record['archs'])}).", ""]  # fmt: skip
        lines += ["| | differ | worse |", "|---|---|---|"]
        lines += [f"| {KINDS[kind]} | {n} | {bad} |" for kind, (n, bad) in record["kinds"].items()]
        if worse := record["worse"]:
            lines += ["", "Worse:", "", *(f"- `{text[:200]}`" for text in worse[:MOST])]
            lines += [f"- and {len(worse) - MOST} more"] * (len(worse) > MOST)
    return "\n".join(lines) + "\n"


MOST = 40
"""Number of findings that a page lists for each comparison."""


def save(pair: str, record: Mapping[str, Any]) -> None:
    """Adds a comparison to the record and writes the page of all of them."""
    records = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    records = {**records, pair: record}
    RECORD.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(records), encoding="utf-8")


# --- command --------------------------------------------------------------------------------------


def released(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?|.*\.json", text):
        raise argparse.ArgumentTypeError(f"{text}: expected a version such as 3.9, or FILE.json")
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of problems, such as 3")
    return int(text)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get("FASTGPT_CACHE", "~/.cache/fastgpt")).expanduser()
    parser = argparse.ArgumentParser(
        prog="python -m kernels.upgrade",
        usage="%(prog)s --to VERSION [--FLAG VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--to", type=released, required=True, metavar="VERSION", help="Triton to move to")
    add("--from", dest="old", type=released, default=version("triton"), metavar="VERSION",
        help="Triton to compare with [the installed one]")  # fmt: skip
    add("--brief", action="store_true", help="one form of each kernel, one problem of each op")
    add("--arch", type=family, nargs="+", choices=ARCHS, help="GPU archs [80 90 100; brief: 90]")
    add("--op", nargs="+", metavar="OP", help="only the kernels of these folders, such as norm")
    add("--problems", type=positive, metavar="N", help="problems of each op to execute [all]")
    add("--modules", nargs="+", metavar="NAME", help="`variants` and `SPECS` of these modules")
    add("--folder", type=Path, default=cache / "upgrade", help="folder of the versions and reports")
    add("--jobs", type=int, default=os.cpu_count(), help="compilations at a time [cores]")
    add("--record", action="store_true", help="save the result, and write docs/upgrades.md")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        if args.record and not PAGE.parent.is_dir():
            raise BadUsageError(f"--record writes {PAGE}: expected a checkout of fastgpt")
        old, new = report_of(args.old, args), report_of(args.to, args)
        if not new["forms"] and not new["results"]:
            raise BadUsageError(f"no kernel was selected by --op {' '.join(args.op or ())}")
    except BadUsageError as error:
        print(f"kernels.upgrade: {error}")
        return 2
    found = compare(old, new)
    record = summary(old, new, found)
    lines: list[tuple[str, ...]] = [("what", "differ", "worse")]
    lines += [(KINDS[kind], *map(str, counts)) for kind, counts in record["kinds"].items()]
    for f in found:
        print(f"{'WORSE ' if f.worse else ''}{f.form}: {f.kind}: {f.text}")
    print(aligned(lines))
    pair = f"{old['triton']} to {new['triton']}"
    print(f"upgrade Triton {pair}? {summary_line(record)}")
    if args.record:
        save(pair, record)
    return 1 if record["worse"] else 0


if __name__ == "__main__":
    sys.exit(main())
