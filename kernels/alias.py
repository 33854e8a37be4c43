"""Makes `import kernels` in a checkout give the modules of the package fastgpt.kernels.

Python finds the folder `kernels/` there first, and under that name. Executed once more, its files
would register every op with torch twice; so the name `kernels` only leads to `fastgpt.kernels`.
Another distribution of the same name, as Hugging Face has one, stays reachable: names that are not
ours are looked up in it.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

OURS = __name__.rpartition(".")[0]  # fastgpt.kernels


class _Same(Loader):
    """Loads `kernels.x` as the module fastgpt.kernels.x itself, not as a second copy."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self.spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has just replaced it

    def get_code(self, name: str) -> CodeType:
        """Returns the code object of the aliased module, for `python -m kernels.NAME`."""
        return self.spec.loader.get_code(self.spec.name)  # pyright: ignore


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        try:
            found = find_spec(f"{OURS}.{rest}") if top == "kernels" else None
        except ModuleNotFoundError:  # a folder of the other distribution
            return None
        return found and spec_from_file_location(
            name,
            found.origin,
            loader=_Same(found),
            submodule_search_locations=found.submodule_search_locations,
        )


def stand_in(path: list[str]) -> Callable[[str], Any]:
    """Makes the package that is imported as `kernels` stand for ours; returns its `__getattr__`.

    Args:
        path: `__path__` of that package; the folder of another distribution named `kernels` is
            appended to it.
    """
    ours = importlib.import_module(OURS)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{OURS}."):
            sys.modules["kernels" + name.removeprefix(OURS)] = module
    sys.meta_path.insert(0, _Finder())
    mine = Path(__file__).name  # which another checkout of ours has, too
    elsewhere = [place for place in sys.path if not Path(place, "kernels", mine).exists()]
    spec = PathFinder.find_spec("kernels", elsewhere)
    other: ModuleType | None = None
    if spec is not None and spec.loader is not None:
        path += spec.submodule_search_locations or []

    def attribute(name: str) -> Any:
        nonlocal other
        if hasattr(ours, name) or spec is None or spec.loader is None:
            return getattr(ours, name)
        if other is None:
            other = module_from_spec(spec)
            spec.loader.exec_module(other)
        return getattr(other, name)

    return attribute
