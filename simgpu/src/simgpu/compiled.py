"""torch.compile: its autotuner takes each candidate for equally fast, after one run of it.

Times mean nothing here, and it would run each kernel a hundred times to measure them.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

BENCHMARKING = "torch._inductor.runtime.benchmarking"


def install() -> None:
    """Changes the autotuner's timer when it is imported, if ever."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != BENCHMARKING:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def then_change(module: Any) -> None:
            execute(module)
            for name in ("TritonBenchmarker", "InductorBenchmarker"):
                getattr(module, name).benchmark_gpu = _once

        spec.loader.exec_module = then_change  # type: ignore[method-assign]
        return spec


def _once(self: Any, function: Any, *args: Any, return_mode: str = "", **given: Any) -> Any:
    """Runs what is to be timed, and returns a millisecond."""
    function()
    return [1.0] if return_mode == "all" else 1.0
