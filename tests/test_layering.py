"""Imports go one way: torch, triton <- fastgpt.kernels <- fastgpt <- {train.py, bench} <- tests."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import printed_by

ROOT = Path(__file__).resolve().parent.parent

# What each part may import of the project, itself included; the kernels are fastgpt.kernels.
FIRST_PARTY = {
    "kernels": {"fastgpt.kernels"},
    "fastgpt": {"fastgpt"},
    "train": {"train", "fastgpt"},
    "bench": {"bench", "fastgpt"},
    "tests": {"tests", "bench", "train", "fastgpt"},
}
PROJECT = {"tests", "bench", "train", "fastgpt", "kernels"}
KERNELS_THIRD_PARTY = {"torch", "triton", "numpy"}


def imported_modules(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of each import, nested ones too; a relative one in full."""
    package = ["fastgpt" * (path.parts[0] == "kernels"), *path.parts[:-1]]
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, level=level):
                above = package[: len(package) - level + 1] if level else []
                yield node.lineno, ".".join([*filter(None, above), *filter(None, [module])])
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def allowed(part: str, module: str) -> bool:
    top = module.partition(".")[0]
    if top in PROJECT:
        return any(f"{module}.".startswith(f"{name}.") for name in FIRST_PARTY[part])
    return part != "kernels" or top in KERNELS_THIRD_PARTY or top in sys.stdlib_module_names


def violations(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{line} imports {module}"
        for part in FIRST_PARTY
        for path in sorted([*root.glob(f"{part}.py"), *root.glob(f"{part}/**/*.py")])
        for line, module in imported_modules(path.relative_to(root), root)
        if not allowed(part, module)
    ]


def test_imports_go_one_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "caught"),
    [
        ("kernels/a.py", "import fastgpt.model", "fastgpt.model"),
        ("kernels/a.py", "def f():\n    from bench import run", "bench"),
        ("kernels/a.py", "import requests", "requests"),
        ("kernels/a.py", "from ..model import GPT", "fastgpt.model"),
        ("kernels/a/b.py", "import importlib\nimportlib.import_module('tests.a')", "tests.a"),
        ("fastgpt/a.py", "import os, bench", "bench"),
        ("fastgpt/a.py", "from tests.parity import assert_parity", "tests.parity"),
        ("fastgpt/a.py", "import train", "train"),
        ("fastgpt/a.py", "from kernels import attention", "kernels"),
        ("fastgpt/a.py", "__import__('bench')", "bench"),
        ("bench/a.py", "import train", "train"),
        ("train.py", "from bench import run", "bench"),
    ],
)
def test_a_seeded_violation_alone_is_caught(tmp_path, file, source, caught):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import math, numpy\n{source}")
    last_line = source.count("\n") + 2
    assert violations(tmp_path) == [f"{file}:{last_line} imports {caught}"]


def test_every_module_but_those_of_kernels_imports_without_triton():
    script = """
import importlib, pkgutil, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import fastgpt
for module in pkgutil.walk_packages(fastgpt.__path__, "fastgpt."):
    last = module.name.rpartition(".")[2]
    if last not in ("__main__", "rows", "forward", "backward", "device"):
        importlib.import_module(module.name)
        print(module.name)
assert "triton" not in sys.modules
"""
    assert {"fastgpt.errors", "fastgpt.kernels.attention.op"} <= set(printed_by(script).split())
