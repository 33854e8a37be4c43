"""Changes single lines of the code, to see that the tests notice: `python -m tests.mutants`.

A mutant is a change of one line, drawn with a fixed seed, not picked by hand. It is found by the
name of its function and the text of its line, in any file. So a plan drawn before a refactoring can
be applied after it (`--plan`), to see that both suites catch the same.
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
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = {  # path:function, and " jit" behind device code; the first that fits
    "device": r"kernels/.* jit",
    "launchers": r"kernels/.*",
    "data": r"fastgpt/data/(loader|order|shards|dataset|writing)\.py.*",
    "checkpoint": r"fastgpt/(checkpoint/checkpoint|files)\.py.*",
    "engine": r"fastgpt/(train/(engine|optim)|parallel/(distributed|signals)|faults/failure)\.py.*",
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


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault made on purpose: one changed line of a file."""

    function: str
    line: str
    mutated: str
    occurrence: int
    group: str
    path: str
    row: int

    def change(self) -> tuple[str, str, str, int]:
        """Identifies the change independently of the file."""
        return self.function, self.line, self.mutated, self.occurrence

    def id(self) -> str:
        return f"{zlib.crc32(repr((self.path, self.change())).encode()):08x}"

    def apply(self, text: str) -> str:
        """Returns the file's `text` with the line changed."""
        lines = text.split("\n")
        lines[self.row] = lines[self.row].replace(self.line, self.mutated)
        return "\n".join(lines)


# --- finding and drawing --------------------------------------------------------------------------


def find(root: Path) -> list[Mutant]:
    """Finds every mutant of the checkout `root`; those that are never drawn have no group."""
    paths = [path for top in ("fastgpt", "kernels") for path in sorted((root / top).rglob("*.py"))]
    return [m for p in paths for m in find_in(p.read_text(), p.relative_to(root).as_posix())]


def find_in(text: str, path: str) -> Iterator[Mutant]:
    """Finds the mutants of one file."""
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
    """Walks over a syntax tree; yields (function, is it device code, row, changed line)."""
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
    """Returns the changed text of a node, or of the operator between its operands."""
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
    """Draws about `count` mutants, equally many from each group of files, at most one per line."""
    plan, found = [], sorted(find(root), key=lambda m: (m.path, m.row))
    for group in GROUPS:
        ours = groupby((m for m in found if m.group == group), lambda m: (m.path, m.row))
        lines = [list(mutants) for _, mutants in ours]
        rng = random.Random(f"{seed} {group}")
        some = rng.sample(lines, min(len(lines), -(-count // len(GROUPS))))
        plan += [rng.choice(mutants) for mutants in some]
    return plan


def locate(mutant: Mutant, found: list[Mutant]) -> Mutant | None:
    """Finds the same change in another tree, at the most similar path; None if it is gone.

    A long line that occurs once also counts in a function of another name.
    """
    same = {m.path: m for m in found if m.change() == mutant.change()}
    if nearest := difflib.get_close_matches(mutant.path, same, n=1, cutoff=0):
        return same[nearest[0]]
    renamed = [m for m in found if (m.line, m.mutated) == (mutant.line, mutant.mutated)]
    return renamed[0] if len(renamed) == 1 and len(mutant.line) > 30 else None


# --- running --------------------------------------------------------------------------------------


def own_tests(path: str) -> list[str]:
    """Returns the pytest arguments for the tests that belong to a module."""
    top, folder, *_ = Path(path).with_suffix("").parts
    if top == "kernels":
        return ["tests/kernels", "-k", folder]
    return [f"tests/{folder}" if (ROOT / "tests" / folder).is_dir() else "tests/train"]


class Copy:
    """A copy of a checkout's files in `folder`, where mutants are made and tested."""

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

    def failure(self, *args: str) -> str | None:
        """Returns the first test that fails, or why pytest did not get that far."""
        command = [sys.executable, "-m", "pytest", "-qx", "--tb=no", "-p", "no:cacheprovider"]
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [*command, "-m", "not slow", *args], cwd=self.root, env=self.environment,
                start_new_session=True, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return f"timeout after {self.timeout} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what hangs, and what tests left
            log.seek(0)
            printed = log.read()
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.M)
        if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            sys.exit(f"pytest {' '.join(args)} cannot run: {printed}")
        if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        return failed[1] if failed else f"pytest's status {status}"

    def caught_by(self, mutant: Mutant, tests: list[str]) -> str | None:
        """Returns the first of `tests` that fails with the mutant; it must pass without."""
        path = self.root / mutant.path
        before = path.read_text()
        path.write_text(mutant.apply(before))
        by = self.failure(*tests)
        path.write_text(before)
        if by and by.startswith("tests/") and self.failure(by):
            sys.exit(f"{by} fails without a mutant, too; mend it, or run on an idle machine")
        return by


def run_mutant(mutant: Mutant, at: Mutant | None, copy: Copy) -> dict[str, Any]:
    """Tests a mutant: first by the tests of its module, then by the whole suite."""
    by, start = None, time.monotonic()
    if at:
        own = own_tests(at.path)
        if (copy.root / own[0]).exists():  # not in a tree that lays its tests out in another way
            by = copy.caught_by(at, own)
        by = by or copy.caught_by(at, ["-n", "2"])
    verdict = "caught" if by else "survived" if at else "gone"
    place = at and f"{at.path}:{at.row + 1}"
    facts = {"verdict": verdict, "by": by, "place": place}
    return asdict(mutant) | facts | {"seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    add = parser.add_argument
    add("--root", type=Path, default=ROOT, help="checkout (this one)")
    add("--seed", type=int, default=0, help="seed of the draw")
    add("--count", type=int, default=40, help="mutants drawn (40)")
    add("--plan", type=Path, help="file of the mutants drawn: read if it is there, else written")
    add("--json", type=Path, help="file for the results; what it has already is not run again")
    add("--timeout", type=int, default=1200, help="seconds for one run of tests (1200)")
    args = parser.parse_args()
    if args.plan and args.plan.exists():
        plan = [Mutant(**fields) for fields in json.loads(args.plan.read_text())]
    else:
        plan = draw(args.root, args.seed, args.count)
        if args.plan:
            args.plan.write_text(json.dumps([asdict(mutant) for mutant in plan], indent=1))
    results = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(args.root.resolve(), Path(folder), args.timeout)
        found = find(copy.root)
        for mutant in plan:
            if mutant.id() not in results:
                results[mutant.id()] = facts = run_mutant(mutant, locate(mutant, found), copy)
                print(json.dumps(facts), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1))
    counts = Counter(results[mutant.id()]["verdict"] for mutant in plan)
    print(f"{len(plan)} mutants: {dict(counts)}")


if __name__ == "__main__":
    main()
