"""Ends a rank in which nothing happens any more; Python's faulthandler writes its stacks.

Its timer needs no Python lock, which native code that hangs may keep. The other ranks end with that
one: see `fastgpt.faults.failure`.
"""

import faulthandler
import sys
import time

STALL_S = 1800.0
"""Seconds without progress after which a process ends: as long as PyTorch's ranks wait for each
other on CPUs. Compiling, a checkpoint and a sample are allowed as long as a step."""
AGAIN_S = 1.0
"""Seconds after which progress sets a new timer: that takes 50 us, a good part of a small step."""
_next, _watching = 0.0, False


def start() -> None:
    """Ends this process once there is no `progress` for `STALL_S`."""
    global _watching
    _watching = True
    progress()


def progress() -> None:
    """Says that this rank goes on."""
    global _next
    now = time.monotonic()
    if _watching and now >= _next:
        _next = now + AGAIN_S
        file = sys.__stderr__ or sys.stderr
        faulthandler.dump_traceback_later(STALL_S + AGAIN_S, exit=True, file=file)


def close() -> None:
    """Ends the watch."""
    global _watching
    _watching = False
    faulthandler.cancel_dump_traceback_later()
