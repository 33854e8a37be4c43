"""Faults made on purpose, to see that the tests catch them: `python -m tests.mutants`.

A mutant is a change of one line, drawn with a fixed seed and not picked by hand. It is found by the
name of its function and the text of its line, whatever the file. So the plan drawn before a
reshaping (`--save`) can be applied after it (`--plan`), to see that both suites catch the same.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

GROUPS = {  # path:function, and " jit" behind device code; the first that fits
    "device": r"kernels/.* jit",
    "launchers": r"kernels/.*",
    "data": r"fastgpt/data/(loader|order|shards|dataset|batches)\.py.*",
    "checkpoint": r"fastgpt/(checkpoint|storage)\.py.*",
    "engine": r"fastgpt/(engine|optim|distributed)\.py.*",
}
# Never drawn: tools that prove kernels and run none, what they compile, command lines.
LEFT_OUT = r"kernels/(aot|sass|tune|predict|parity|proof|\w*/?spec)|.*\b(main|parse|\w*cases?)\b"
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not",
    "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and", "+": "-", "-": "+",
    "*": "+", "//": "*",  # floats and tensors have no `//` to swap with
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum",
    "True": "False", "False": "True", "0.0": "1.0", "1.0": "0.0",
}  # fmt: skip

# A module's tests are the files named like it; in kernels/ a folder, or what is left of a suffix.
SUFFIX = r"_(op|launch|kernels|fwd|bwd|config|dropout|blocked|plain|chunks)$"
ALSO_TESTED_BY = {
    "batches": "build", "checkpoint": "resume", "distributed": "ddp", "engine": "train resume",
    "loader": "batches", "runtime": "norm", "storage": "sources corpus",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed line and where it was found; `occurrence` tells equal ones of a function apart."""

    function: str
    line: str
    mutated: str
    occurrence: int
    group: str
    path: str
    row: int

    def change(self) -> tuple[str, str, str, int]:
        """The part that is the same in every tree."""
        return self.function, self.line, self.mutated, self.occurrence

    def id(self) -> str:
        return f"{zlib.crc32(repr((self.path, self.change())).encode()):08x}"

    def apply(self, text: str) -> str:
        """The file's `text` with the line changed."""
        lines = text.split("\n")
        lines[self.row] = lines[self.row].replace(self.line, self.mutated)
        return "\n".join(lines)


# --- finding and drawing --------------------------------------------------------------------------


def find(root: Path) -> list[Mutant]:
    """Every mutant of the checkout `root`; those that are never drawn have no group."""
    paths = [path for top in ("fastgpt", "kernels") for path in sorted((root / top).rglob("*.py"))]
    return [m for p in paths for m in find_in(p.read_text(), p.relative_to(root).as_posix())]


def find_in(text: str, path: str) -> Iterator[Mutant]:
    """The mutants of one file."""
    lines, seen = text.encode().split(b"\n"), Counter()
    for function, jit, row, mutated in dict.fromkeys(_walk(ast.parse(text), lines, "", None)):
        place = f"{path}:{function}{jit * ' jit'}"
        fitting = [group for group, pattern in GROUPS.items() if re.fullmatch(pattern, place)]
        group = "" if re.match(LEFT_OUT, place) or not fitting else fitting[0]
        mutant = Mutant(function, lines[row].decode().strip(), mutated, 0, group, path, row)
        yield replace(mutant, occurrence=seen[mutant.change()])
        seen[mutant.change()] += 1


def _walk(
    node: ast.AST, lines: list[bytes], function: str, jit: bool | None
) -> Iterator[tuple[str, bool, int, str]]:
    """Yields (function, is it device code, row, changed line); `jit` is None outside functions."""
    if isinstance(node, ast.Raise | ast.JoinedStr):  # messages
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".strip(".")
    if isinstance(node, ast.FunctionDef):
        jit = bool(jit) or any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    elif jit is not None:
        yield from ((function, jit, *change) for change in _changes(node, lines))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "msg"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, lines, function, jit)


def _changes(node: ast.AST, lines: list[bytes]) -> Iterator[tuple[int, str]]:
    """Yields (row, changed line) for the node itself, without its children."""
    operands: list[ast.expr] = []
    spans: list[tuple[int, int | None, int | None]] = []
    match node:
        case ast.Compare():
            operands = [node.left, *node.comparators]
        case ast.BoolOp():
            operands = node.values
        case ast.BinOp():
            operands = [node.left, node.right]
        case ast.expr() | ast.stmt() if node.lineno == node.end_lineno:
            spans.append((node.lineno - 1, node.col_offset, node.end_col_offset))
    for a, b in pairwise(operands):  # the operator stands between the two
        start = a.end_col_offset if a.end_lineno == b.lineno else 0
        spans.append((b.lineno - 1, start, b.col_offset))
    for row, start, end in spans:
        old = lines[row][start:end].decode()
        if (new := _changed(node, old)) != old:
            yield row, (lines[row][:start] + new.encode() + lines[row][end:]).decode().strip()


def _changed(node: ast.AST, old: str) -> str:
    """The changed text of a node, or of the operator between its operands."""
    match node:
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            return "pass"
        case ast.UnaryOp():
            return old.removeprefix("not ")
    word = node.attr if isinstance(node, ast.Attribute) else old.strip("() ")
    if word.replace("_", "").isdecimal():
        return str(int(word) + 1)
    return SWAPS[word].join(old.rsplit(word, 1)) if word in SWAPS else old


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """`count` mutants or a few more, as many from each group, no two of one line."""
    plan, found = [], sorted(find(root), key=lambda m: (m.path, m.row))
    for group in GROUPS:
        ours = groupby((m for m in found if m.group == group), lambda m: (m.path, m.row))
        lines = [list(mutants) for _, mutants in ours]
        rng = random.Random(f"{seed} {group}")
        some = rng.sample(lines, min(len(lines), -(-count // len(GROUPS))))
        plan += [rng.choice(mutants) for mutants in some]
    return plan


def locate(mutant: Mutant, found: list[Mutant]) -> Mutant | None:
    """The same change in another tree, where the path is most like the old one; None if gone.

    A line of some length that is found once counts even in a function of another name.
    """
    same = {m.path: m for m in found if m.change() == mutant.change()}
    if nearest := difflib.get_close_matches(mutant.path, same, n=1, cutoff=0):
        return same[nearest[0]]
    renamed = [m for m in found if (m.line, m.mutated) == (mutant.line, mutant.mutated)]
    return renamed[0] if len(renamed) == 1 and len(mutant.line) > 30 else None


# --- running --------------------------------------------------------------------------------------


def own_tests(path: str, root: Path) -> list[str]:
    """The arguments with which pytest runs a module's own tests; empty if it has none."""
    parts = Path(path).with_suffix("").parts
    name = re.sub(SUFFIX, "", parts[1] if parts[0] == "kernels" else parts[-1])
    names = [name, *ALSO_TESTED_BY.get(name, "").split()]
    files = sorted((root / "tests").rglob("*.py"))
    own = [p for p in files if p.stem.startswith("test_") and any(n in p.stem for n in names)]
    if parts[0] == "kernels":
        own += [p for p in files if "conformance" in p.stem and p not in own]
    words = ["-k", " or ".join(names)]
    return [str(p.relative_to(root)) for p in own] + words if own else []


class Copy:
    """A checkout's files, copied into `folder`, where mutants are made and tested."""

    def __init__(self, root: Path, folder: Path, timeout: int) -> None:
        self.root, self.timeout = folder / "checkout", timeout
        top = {".git", ".venv", "build", "data", "runs"}
        shutil.copytree(
            root, self.root, symlinks=True,
            ignore=lambda at, _: {"__pycache__"} | (top if Path(at) == root else set()),
        )  # fmt: skip
        self.environment = os.environ | {
            "FASTGPT_DATA": os.path.abspath(os.environ.get("FASTGPT_DATA") or root / "data"),
            "PYTHONDONTWRITEBYTECODE": "1",  # nothing compiled from one mutant reaches the next
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "TMPDIR": str(folder),
        }
        # tests that fail without a mutant, or that were tried on every mutant alone
        self.left_out: list[str] = []

    def failures(self, *args: str) -> list[str]:
        """The tests that fail, or why pytest did not get that far."""
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += ["-m", "not slow", *args, *(f"--deselect={test}" for test in self.left_out)]
        timeout = 2 * self.timeout if "-n" in args else self.timeout
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.environment, start_new_session=True,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return [f"timeout after {timeout} s"]
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what hangs, and what tests left
            log.seek(0)
            printed = log.read()
        if status in (0, 5):  # 5: no test was selected
            return []
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.M)
        return failed or [f"pytest's status {status}"]

    def failures_with(self, mutants: list[Mutant], *args: str) -> list[str]:
        """`failures` with all of `mutants` made at once."""
        before = {path: path.read_text() for path in {self.root / m.path for m in mutants}}
        for mutant in mutants:
            path = self.root / mutant.path
            path.write_text(mutant.apply(path.read_text()))
        failed = self.failures(*args)
        for path, text in before.items():
            path.write_text(text)
        return failed

    def catch(self, mutant: Mutant, tests: list[str]) -> str | None:
        """The first of `tests` that catches the mutant: pytest's id, or a timeout.

        A test must fail twice with the mutant and not without: no accident of a busy machine.
        """
        passed = []
        while failed := self.failures_with([mutant], "-x", *tests, *passed):
            alone = [failed[0]] if failed[0].startswith("tests/") else tests
            if self.failures(*alone):
                if alone is tests:
                    sys.exit(f"{failed[0]}, even without a mutant: raise --timeout?")
                print(f"fails without a mutant, so it is left out: {failed[0]}", flush=True)
                self.left_out.append(failed[0])
            elif alone is tests or self.failures_with([mutant], *alone):
                return failed[0]
            else:
                passed.append(f"--deselect={failed[0]}")
        return None


def run(plan: list[Mutant], copy: Copy, file: Path | None) -> Counter[str]:
    """Judges the mutants that `file` has no verdict on yet, and returns the number of each verdict.

    Each mutant meets the tests of its module first. Those that pass are put into one copy, on which
    the whole suite runs: it takes long. The tests that fail there are then run on each such mutant
    alone, and the suite runs again, until it passes with all remaining mutants: they survived.
    """
    results = json.loads(file.read_text()) if file and file.exists() else {}
    found = find(copy.root)
    there = {mutant.id(): locate(mutant, found) for mutant in plan}

    def judge(mutant: Mutant, tests: list[str], uncaught: str) -> None:
        at, start = there[mutant.id()], time.monotonic()
        by = copy.catch(at, tests) if at and tests else None
        verdict = "gone" if not at else "caught" if by else uncaught
        place, seconds = at and f"{at.path}:{at.row + 1}", round(time.monotonic() - start)
        facts = {"verdict": verdict, "by": by, "place": place, "seconds": seconds}
        results[mutant.id()] = asdict(mutant) | facts
        if file:
            file.write_text(json.dumps(results, indent=1))
        print(f"{mutant.id()} {mutant.group} {place} {mutant.function}: {mutant.line} ->", end=" ")
        print(f"{mutant.mutated}: {by or verdict.upper()}, {seconds} s", flush=True)

    for mutant in plan:
        if mutant.id() not in results:
            at = there[mutant.id()]
            judge(mutant, own_tests(at.path, copy.root) if at else [], "left")
    while left := [mutant for mutant in plan if results[mutant.id()]["verdict"] == "left"]:
        failed = copy.failures_with([at for m in left if (at := there[m.id()])], "-n", "2")
        tests = failed if not failed or failed[0].startswith("tests/") else ["-n", "2"]
        for mutant in left:
            judge(mutant, tests, "left" if failed else "survived")
        copy.left_out += failed
    return Counter(results[mutant.id()]["verdict"] for mutant in plan)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    add = parser.add_argument
    add("--root", type=Path, default=Path(__file__).parents[1], help="checkout (this one)")
    add("--seed", type=int, default=0, help="seed of the draw")
    add("--count", type=int, default=40, help="mutants drawn (40)")
    add("--plan", type=Path, help="file with the mutants to use, instead of a draw")
    add("--save", type=Path, help="file for the plan")
    add("--json", type=Path, help="file for the results; what it has already is not run again")
    add("--timeout", type=int, default=600, help="seconds for a module's tests (600), suite 2x")
    args = parser.parse_args()
    if args.plan:
        plan = [Mutant(**fields) for fields in json.loads(args.plan.read_text())]
    else:
        plan = draw(args.root, args.seed, args.count)
    if args.save:
        args.save.write_text(json.dumps([asdict(mutant) for mutant in plan], indent=1))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        counts = run(plan, Copy(args.root.resolve(), Path(folder), args.timeout), args.json)
    verdicts = ", ".join(f"{counts[v]} {v}" for v in ("caught", "survived", "gone"))
    print(f"{len(plan)} mutants: {verdicts}")


if __name__ == "__main__":
    main()
