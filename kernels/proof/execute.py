"""Old name of `simgpu.executor` and of its command."""

import sys
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
    from .fenced import executor

    return getattr(executor, name)


if __name__ == "__main__":
    warnings.warn(MOVED, DeprecationWarning, stacklevel=1)
    try:
        from . import fenced  # noqa: F401  (our kernels are compiled with their fences)
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    from simgpu.executor.__main__ import main

    sys.exit(main())
