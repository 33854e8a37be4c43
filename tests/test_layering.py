"""Imports go one way: torch, triton <- kernels <- fastgpt <- {train.py, bench} <- tests."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each part may import of the project, itself included.
FIRST_PARTY = {
    "kernels": {"kernels"},
    "fastgpt": {"fastgpt", "kernels"},
    "train": {"train", "fastgpt", "kernels"},
    "bench": {"bench", "fastgpt", "kernels"},
    "tests": {"tests", "bench", "train", "fastgpt", "kernels"},
}
KERNELS_THIRD_PARTY = {"torch", "triton", "rich"}  # rich: what kernels.tune shows


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, nested ones too; a relative one starts with a dot."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, level=level):
                yield node.lineno, "." * level + (module or "")
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def allowed(part: str, module: str) -> bool:
    top = module.partition(".")[0]
    if top in FIRST_PARTY:
        return top in FIRST_PARTY[part]
    if part == "kernels":
        return top in KERNELS_THIRD_PARTY or top in sys.stdlib_module_names
    return top != ""  # empty: a relative import


def violations(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{line} imports {module}"
        for part in FIRST_PARTY
        for path in sorted([*root.glob(f"{part}.py"), *root.glob(f"{part}/**/*.py")])
        for line, module in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
        if not allowed(part, module)
    ]


def test_imports_go_one_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "caught"),
    [
        ("kernels/a.py", "import fastgpt.model", "fastgpt.model"),
        ("kernels/a.py", "def f():\n    from bench import run", "bench"),
        ("kernels/a.py", "import numpy as np", "numpy"),
        ("kernels/a/b.py", "import importlib\nimportlib.import_module('tests.a')", "tests.a"),
        ("fastgpt/a.py", "import os, bench", "bench"),
        ("fastgpt/a.py", "from tests.parity import assert_parity", "tests.parity"),
        ("fastgpt/a.py", "import train", "train"),
        ("fastgpt/a.py", "from .model import GPT", ".model"),
        ("fastgpt/a.py", "__import__('bench')", "bench"),
        ("bench/a.py", "import train", "train"),
        ("train.py", "from bench import run", "bench"),
        ("tests/a.py", "from . import parity", "."),
    ],
)
def test_a_seeded_violation_is_caught(tmp_path, file, source, caught):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    last_line = source.count("\n") + 1
    assert violations(tmp_path) == [f"{file}:{last_line} imports {caught}"]


def test_allowed_imports_are_not_reported(tmp_path):
    sources = {
        "kernels/a.py": "import math\nimport torch.nn\nimport triton.language\nimport kernels.b",
        "fastgpt/a.py": "import numpy\nfrom kernels import attention\nimport fastgpt.model",
        "train.py": "from fastgpt.trainer import Trainer",
        "bench/a.py": "import bench.timing, fastgpt, kernels",
        "tests/a.py": "import bench, fastgpt, kernels, train, tests.parity",
    }
    for file, source in sources.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []


def test_every_fastgpt_module_imports_without_triton():
    script = """
import importlib, pkgutil, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import fastgpt
for module in pkgutil.walk_packages(fastgpt.__path__, "fastgpt."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print(module.name)
assert "triton" not in sys.modules
"""
    imported = run_python("-c", script, cwd=ROOT).split()
    assert "fastgpt.errors" in imported


# --- whose `kernels` ------------------------------------------------------------------------------

PROBE = "import importlib.util\nprint('kernels:', importlib.util.find_spec('kernels').origin)\n"


def run_python(*args: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder late on sys.path, as site-packages is, with another distribution's `kernels`."""
    folder = tmp_path / "site"
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "__init__.py").write_text("")
    (folder / "probe.py").write_text(PROBE)
    return folder


def origin(output: str) -> Path:
    line = next(line for line in output.splitlines() if line.startswith("kernels: "))
    return Path(line.removeprefix("kernels: ")).resolve()


def test_kernels_in_this_process_is_ours():
    import kernels

    assert Path(kernels.__file__).resolve() == ROOT / "kernels" / "__init__.py"


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(("-m", "probe"), id="-m probe"),
        pytest.param(("-m", "pytest", "--noconftest", "-pprobe", "--markers"), id="-m pytest"),
    ],
)
def test_kernels_is_ours_from_the_root(site, args):
    output = run_python(*args, cwd=ROOT, PYTHONPATH=str(site))
    assert origin(output) == ROOT / "kernels" / "__init__.py"


def test_kernels_is_ours_for_a_script_in_the_root(site, tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "kernels").symlink_to(ROOT / "kernels")
    (root / "train.py").write_text(PROBE)
    output = run_python("train.py", cwd=root, PYTHONPATH=str(site))
    assert origin(output) == ROOT / "kernels" / "__init__.py"


def test_the_other_kernels_is_found_outside_the_root(site, tmp_path):
    output = run_python("-m", "probe", cwd=tmp_path, PYTHONPATH=str(site))
    assert origin(output) == site / "kernels" / "__init__.py"
