"""Old name of `simgpu.executor`."""

import warnings
from typing import Any

MOVED = (
    "fastgpt.kernels.proof.execute is now simgpu.executor, and its command `python -m"
    " simgpu.executor`; the old names go with 0.4.0"
)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(MOVED, DeprecationWarning, stacklevel=2)
    from ..fenced import executor

    return getattr(executor, name)
