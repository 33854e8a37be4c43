"""Old name of the command `python -m simgpu.executor`."""

import sys
import warnings

from . import MOVED


def main() -> int:
    """Runs the command by its new name; returns its exit status."""
    warnings.warn(MOVED, DeprecationWarning, stacklevel=1)
    try:
        from .. import fenced  # noqa: F401  (our kernels are compiled with their fences)
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from simgpu.executor.__main__ import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
