"""Imports go one way: torch, triton <- fastgpt.kernels <- fastgpt <- {bench, train.py} <- tests.

Inside of fastgpt they go down the floors of `ROOMS`.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

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


def imported_modules(path: Path, names: bool = False) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of each import, nested ones too; a relative one in full.

    Args:
        names: `from a import b` is a.b, not a.
    """
    package = ["fastgpt" * (path.parts[0] == "kernels"), *path.parts[:-1]]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
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


def test_imports_go_one_way():
    part_of = {
        path: part
        for part in FIRST_PARTY
        for path in sorted([*ROOT.glob(f"{part}.py"), *ROOT.glob(f"{part}/**/*.py")])
    }
    assert len({*part_of.values()}) == len(FIRST_PARTY)
    for path, part in part_of.items():
        for line, module in imported_modules(path.relative_to(ROOT)):
            assert allowed(part, module), f"{path}:{line} imports {module}"


def test_rooms_import_of_lower_floors_alone():
    inside = {path.stem for path in (ROOT / "fastgpt").glob("*.py")} - {"__init__"}
    inside |= {path.parent.name for path in (ROOT / "fastgpt").glob("*/__init__.py")}
    assert inside == {*FLOOR}
    for path in sorted(ROOT.glob("fastgpt/**/*.py")):
        relative = path.relative_to(ROOT)
        if "kernels" in relative.parts or relative == Path("fastgpt/__init__.py"):
            continue  # the package's names are of all rooms
        room = relative.parts[1].removesuffix(".py")
        for line, module in imported_modules(relative):
            other = f"{module}.".split(".")[1]
            above = not module.startswith("fastgpt.") or other == room or FLOOR[other] < FLOOR[room]
            assert above, f"{relative}:{line} imports {module}"


def test_no_modules_import_each_other_in_a_circle():
    folders = (ROOT / "fastgpt", ROOT / "kernels", ROOT / "simgpu" / "src")
    paths = [path.relative_to(ROOT) for folder in folders for path in sorted(folder.rglob("*.py"))]
    modules = {}
    for path in paths:
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        name = "fastgpt." * (path.parts[0] == "kernels") + name.removeprefix("simgpu.src.")
        modules[name] = path
    del modules["fastgpt"]  # its names are of all rooms
    graph = {
        name: {
            module if module in modules else module.rpartition(".")[0]
            for _, module in imported_modules(path, names=True)
        }
        & modules.keys() - {name}
        for name, path in modules.items()
    }
    order = [*TopologicalSorter(graph).static_order()]  # else CycleError, which names the circle
    assert len(order) > 165


def test_the_core_stays_below_its_ceiling():
    """A feature is outside of the core, or pays with a deletion."""
    core = "config/* model/* train/* parallel/* checkpoint/* data/loader data/order data/dataset"
    parts = (*core.split(), "data/shards")
    paths = [path for part in parts for path in ROOT.glob(f"fastgpt/{part}.py")]
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
