"""Imports go one way: torch, triton <- fastgpt.kernels <- fastgpt <- {bench, train.py} <- tests.

The scripts of examples/ import fastgpt alone. simgpu imports nothing of these, its tests only what
forks processes; kernels/proof and the tests import its executor, bench what it counts. Inside of
fastgpt, imports go down the floors of `ROOMS`.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.processes import printed_by

ROOT = Path(__file__).resolve().parent.parent

# What each part may import of the project, itself included; the kernels are fastgpt.kernels. A file
# belongs to the last part that has it.
FIRST_PARTY = {
    "simgpu": {"simgpu"},
    "simgpu/src/simgpu/executor": {"simgpu.executor"},
    "simgpu/tests/cuda": {"simgpu", "tests.processes"},
    "kernels": {"fastgpt.kernels"},
    "kernels/proof": {"fastgpt.kernels", "simgpu.executor"},
    "fastgpt": {"fastgpt"},
    "train": {"train", "fastgpt"},
    "bench": {"bench", "fastgpt", "simgpu"},
    "examples": {"fastgpt"},
    "tests": {"tests", "bench", "train", "fastgpt", "simgpu.executor"},
}
# The rooms of fastgpt by floor: each imports of the floors above it in this list, and of itself.
ROOMS = (
    "kernels",
    "commands files require_torch terminal",
    "errors",
    "config device",
    "data faults flags logs ops",
    "model prepare",
    "autotune parallel sampling",
    "checkpoint",
    "convert guards run",
    "evaluate hf sample serve",
    "train",
    "cli compare report",
    "doctor __main__",
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms.split()}
PROJECT = {"tests", "bench", "examples", "train", "fastgpt", "kernels", "simgpu"}
LEAN = {"simgpu/src/simgpu/executor", "kernels", "kernels/proof"}
LEAN_THIRD_PARTY = {"torch", "triton", "numpy"}


def imported_modules(path: Path, root: Path, names: bool = False) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of each import, nested ones too; a relative one in full.

    Args:
        names: `from a import b` is a.b, not a.
    """
    package = ["fastgpt" * (path.parts[0] == "kernels"), *path.parts[:-1]]
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, level=level, names=aliases):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*filter(None, above), *filter(None, [module])])
                for last in [alias.name for alias in aliases] if names else [""]:
                    yield node.lineno, f"{base}.{last}".rstrip(".")
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
    return part not in LEAN or top in LEAN_THIRD_PARTY or top in sys.stdlib_module_names


def violations(root: Path) -> list[str]:
    part_of = {
        path: part
        for part in FIRST_PARTY
        for path in sorted([*root.glob(f"{part}.py"), *root.glob(f"{part}/**/*.py")])
    }
    return [
        f"{path.relative_to(root)}:{line} imports {module}"
        for path, part in part_of.items()
        for line, module in imported_modules(path.relative_to(root), root)
        if not allowed(part, module)
    ]


def test_imports_go_one_way():
    assert violations(ROOT) == []


def room_violations(root: Path) -> list[str]:
    """Lists the imports of fastgpt's rooms that go up, or across to another room of the floor."""
    found = []
    for path in sorted(root.glob("fastgpt/**/*.py")):
        if path == root / "fastgpt" / "__init__.py" or "kernels" in path.parts:
            continue  # the package's names are of all rooms
        relative = path.relative_to(root)
        room = relative.parts[1].removesuffix(".py")
        for line, module in imported_modules(relative, root):
            other = f"{module}.".split(".")[1]
            if not module.startswith("fastgpt.") or other == room:
                continue
            if FLOOR[other] >= FLOOR[room]:
                found.append(f"{relative}:{line} imports {module}")
    return found


def test_rooms_import_of_lower_floors_alone():
    assert room_violations(ROOT) == []
    inside = {path.stem for path in (ROOT / "fastgpt").glob("*.py")} - {"__init__"}
    inside |= {path.parent.name for path in (ROOT / "fastgpt").glob("*/__init__.py")}
    assert inside == {*FLOOR}


def module_graph(package: str) -> dict[str, set[str]]:
    """Returns the modules of fastgpt, its kernels or simgpu that each of them imports."""
    paths = [p.relative_to(ROOT) for p in sorted((ROOT / package).rglob("*.py"))]
    paths = [p for p in paths if (package == "kernels") == ("kernels" in p.parts)]
    above = "fastgpt." * (package == "kernels")
    modules = {
        above + ".".join(p.with_suffix("").parts).removesuffix(".__init__"): p for p in paths
    }
    modules = {name.removeprefix("simgpu.src."): path for name, path in modules.items()}
    return {
        name: {
            other
            for _, module in imported_modules(path, ROOT, names=True)
            for other in ((module if module in modules else module.rpartition(".")[0]),)
            if other in modules and other != name
        }
        for name, path in modules.items()
    }


@pytest.mark.parametrize(
    ("package", "least"), [("fastgpt", 90), ("kernels", 50), ("simgpu/src", 25)]
)
def test_no_modules_import_each_other_in_a_circle(package, least):
    graph = module_graph(package)
    graph.pop("fastgpt", None)  # its names are of all rooms
    order = [*TopologicalSorter(graph).static_order()]  # else CycleError, which names the circle
    assert len(order) > least


def test_an_import_of_a_higher_floor_is_caught(tmp_path):
    (tmp_path / "fastgpt" / "convert").mkdir(parents=True)
    (tmp_path / "fastgpt" / "convert" / "a.py").write_text("def f():\n    import fastgpt.run.lock")
    assert room_violations(tmp_path) == ["fastgpt/convert/a.py:2 imports fastgpt.run.lock"]


@pytest.mark.parametrize(
    ("file", "source", "caught"),
    [
        ("kernels/a.py", "def f():\n    from bench import run", "bench"),
        ("kernels/a.py", "import requests\n", "requests"),
        ("kernels/a.py", "import math\nfrom ..model import GPT", "fastgpt.model"),
        ("kernels/proof/a.py", "import math\nimport simgpu.operators", "simgpu.operators"),
        ("fastgpt/a.py", "import math\n__import__('bench')", "bench"),
        ("train.py", "import importlib\nimportlib.import_module('tests.a')", "tests.a"),
    ],
)
def test_an_import_of_another_part_is_caught(tmp_path, file, source, caught):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    line = 1 if source.endswith("\n") else 2
    assert violations(tmp_path) == [f"{file}:{line} imports {caught}"]


def test_the_core_stays_below_its_ceiling():
    """A feature is outside of the core, or pays with a deletion."""
    core = (
        "config/*",
        "model/*",
        "train/*",
        "parallel/*",
        "checkpoint/*",
        "data/loader",
        "data/order",
    )
    paths = [
        p
        for part in (*core, "data/dataset", "data/shards")
        for p in ROOT.glob(f"fastgpt/{part}.py")
    ]
    assert len(paths) > 30
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in paths) <= 5_300


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
    if last not in ("__main__", "rows", "forward", "backward", "device", "curves"):  # bokeh's
        importlib.import_module(module.name)
        print(module.name)
assert "triton" not in sys.modules
"""
    assert {"fastgpt.errors", "fastgpt.kernels.attention.op"} <= set(printed_by(script).split())
