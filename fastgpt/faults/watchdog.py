"""Ends a rank in which nothing happens any more; Python's faulthandler writes its stacks.

Its timer needs no Python lock, which native code that hangs may keep. The other ranks end with that
one: see `fastgpt.faults.failure`.
"""

import faulthandler
import sys
import time

SLOW_S = 1800.0
"""Least number of seconds allowed to what has no steps: compiling, a checkpoint, a sample."""
AGAIN_S = 1.0
"""Seconds after which progress sets a new timer: that takes 50 us, a good part of a small step."""
_seconds = _next = 0.0


def start(seconds: float) -> None:
    """Ends this process once there is no `progress` for so many seconds; 0: never."""
    global _seconds
    _seconds = seconds
    progress(slow=True)


def progress(slow: bool = False) -> None:
    """Says that this rank goes on; what is slow is allowed `SLOW_S` at least."""
    global _next
    now = time.monotonic()
    if _seconds and (slow or now >= _next):
        _next = now if slow else now + AGAIN_S
        allowed = max(_seconds, SLOW_S if slow else 0) + AGAIN_S
        faulthandler.dump_traceback_later(allowed, exit=True, file=sys.__stderr__ or sys.stderr)


def close() -> None:
    """Ends the watch."""
    global _seconds
    _seconds = 0.0
    faulthandler.cancel_dump_traceback_later()
