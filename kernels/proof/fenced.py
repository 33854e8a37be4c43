"""The executor of `simgpu`, which compiles our kernels as they are launched: with the fences."""

import sys
from pathlib import Path

from .. import fences

CHECKOUT = Path(__file__).resolve().parents[2] / "simgpu" / "src"
if CHECKOUT.is_dir():
    sys.path.insert(0, str(CHECKOUT))
try:
    import simgpu.executor as executor
    from simgpu.executor import compile_launch, execute, run_launch
except ImportError as error:
    raise ImportError(
        "compiled kernels are executed by simgpu.executor, which is not installed:"
        " pip install ./simgpu in a checkout of fastgpt"
    ) from error

__all__ = ["compile_launch", "execute", "executor", "run_launch"]

executor.around_compilation.append(fences.compile_with_fences)
