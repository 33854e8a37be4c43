"""Changes single lines of the code, to see that the tests notice: `python -m tests.mutants`.

A mutant is a change of one line, drawn with a fixed seed, not picked by hand.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = {  # path:function, and " jit" behind device code; the first that fits
    "device": r"kernels/.* jit",
    "launchers": r"kernels/.*",
    "data": r"fastgpt/data/.*",
    "checkpoint": r"fastgpt/(checkpoint/\w+|files)\.py.*",
    "train": r"fastgpt/(train|guards|faults|device)/.*",
    "parallel": r"fastgpt/parallel/.*",
    "model": r"fastgpt/(model|ops|config|convert)/.*",
    "use": r"fastgpt/.*",
    "simgpu": r"simgpu/.*",
}
# Never drawn: tools that prove kernels and run none, what they compile, command lines.
LEFT_OUT = r"kernels/(aot|tune|predict|parity|hub|upgrade|check|specs|\w*/?spec)|.*\b(main|parse|\w*cases?)\b"
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

    group: str
    path: str
    row: int
    line: str
    mutated: str

    def apply(self, text: str) -> str:
        """Returns the file's `text` with the line changed."""
        lines = text.split("\n")
        lines[self.row] = lines[self.row].replace(self.line, self.mutated)
        return "\n".join(lines)


# --- finding and drawing --------------------------------------------------------------------------


def find_in(path: Path) -> Iterator[Mutant]:
    """Finds the mutants of one file, but those that are never drawn."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    lines = text.encode().split(b"\n")
    for function, jit, row, mutated in dict.fromkeys(_walk(ast.parse(text), lines, "", None)):
        place = f"{name}:{function}{jit * ' jit'}"
        if not re.match(LEFT_OUT, place):
            group = next(group for group, pattern in GROUPS.items() if re.fullmatch(pattern, place))
            yield Mutant(group, name, row, lines[row].decode().strip(), mutated)


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


def draw(seed: int, count: int) -> list[Mutant]:
    """Draws about `count` mutants, equally many from each group of files, at most one per line."""
    tops = ("fastgpt", "kernels", "simgpu/src/simgpu")
    paths = [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]
    link = ROOT / "fastgpt" / "kernels"
    found = [x for path in paths if link not in path.parents for x in find_in(path)]
    found.sort(key=lambda mutant: (mutant.path, mutant.row))
    plan = []
    for group in GROUPS:
        ours = groupby((m for m in found if m.group == group), lambda m: (m.path, m.row))
        lines = [list(mutants) for _, mutants in ours]
        rng = random.Random(f"{seed} {group}")
        some = rng.sample(lines, min(len(lines), -(-count // len(GROUPS))))
        plan += [rng.choice(mutants) for mutants in some]
    return plan


# --- running --------------------------------------------------------------------------------------


def own_tests(path: str) -> list[str]:
    """Returns the pytest arguments for the tests that belong to a module."""
    top, folder, *_ = Path(path).with_suffix("").parts
    if top == "simgpu":
        return ["simgpu/tests/executor", "tests/proof"]
    if top == "kernels":
        return ["tests/kernels", "-k", folder]
    return [f"tests/{folder}" if (ROOT / "tests" / folder).is_dir() else "tests/train"]


def first_failure(root: Path, timeout: int, *args: str) -> str | None:
    """Returns the first test that fails in the checkout `root`, or why pytest did not get there."""
    command = [sys.executable, "-m", "pytest", "-qx", "--tb=no", "-p", "no:cacheprovider"]
    changed = {
        "FASTGPT_DATA": os.path.abspath(os.environ.get("FASTGPT_DATA") or ROOT / "data"),
        "PYTHONDONTWRITEBYTECODE": "1",  # nothing compiled from one mutant reaches the next
        "PYTHONPATH": str(root),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TMPDIR": str(root.parent),
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "-m", "not slow", *args], cwd=root, env=os.environ | changed,
            start_new_session=True, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"timeout after {timeout} s"
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


def caught_by(mutant: Mutant, root: Path, timeout: int) -> str | None:
    """Returns the first test that fails with the mutant: of its module, then of the whole suite."""
    path = root / mutant.path
    before = path.read_text()
    path.write_text(mutant.apply(before))
    by = first_failure(root, timeout, *own_tests(mutant.path))
    by = by or first_failure(root, timeout, "-n", "2")
    path.write_text(before)
    if by and "::" in by and first_failure(root, timeout, by):
        sys.exit(f"{by} fails without a mutant, too; mend it, or run on an idle machine")
    return by


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the draw")
    add("--count", type=int, default=40, help="mutants drawn (40)")
    add("--only", default=".", help="of these those whose path and line match a pattern")
    add("--timeout", type=int, default=1200, help="seconds for one run of tests (1200)")
    args = parser.parse_args()
    verdicts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder) / "checkout"
        top = {".git", ".venv", "build", "data", "runs"}
        shutil.copytree(
            ROOT, root, symlinks=True,
            ignore=lambda at, _: {"__pycache__"} | (top if Path(at) == ROOT else set()),
        )  # fmt: skip
        for mutant in draw(args.seed, args.count):
            place = f"{mutant.path}:{mutant.row + 1}"
            if re.search(args.only, f"{place} {mutant.line}"):
                by = caught_by(mutant, root, args.timeout)
                verdicts["caught" if by else "survived"] += 1
                print(
                    f"{place}  {mutant.line}  ->  {mutant.mutated}: {by or 'SURVIVED'}", flush=True
                )
    print(f"{verdicts.total()} mutants: {dict(verdicts)}")


if __name__ == "__main__":
    main()
