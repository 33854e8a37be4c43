"""Ends a run in which nothing happens any more, and says where each rank's threads are."""

import sys
import threading
import traceback

from fastgpt.errors import tell_torchrun
from fastgpt.faults import failure
from fastgpt.terminal import one_line, print_report

SLOW_S = 1800.0
"""Least number of seconds allowed to what has no steps: compiling, a checkpoint, a sample."""
LOOKS = 20
"""Number of times that progress is looked for in the time allowed."""


class Watchdog:
    """Thread that ends all ranks after `seconds` without progress on this one.

    It counts its own looks and not seconds of a clock, so that a process that was stopped (Ctrl-Z)
    and goes on does not seem to have stalled. A rank whose thread cannot run, because native code
    keeps Python's lock or because it stays stopped, is noticed by the ranks that wait for it; it
    writes no stacks, and torchrun kills it 30 seconds after they have ended.

    Args:
        seconds: time allowed to a micro-step or an evaluation batch; 0: no limit.
        rank: rank of this process.
    """

    def __init__(self, seconds: float, rank: int) -> None:
        self.seconds, self.rank = seconds, rank
        self._seen: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self.doing("starting")
        failure.on_stall(self.report)
        if self.seconds:
            self._thread.start()

    def doing(self, phase: str, at: str = "", slow: bool = False) -> None:
        """Says what begins now, which is progress.

        Args:
            phase: such as `forward and backward`. The first one of a name may compile.
            at: such as `step 3`.
            slow: allows it `SLOW_S` at least, as the first one of a name.
        """
        slow |= phase not in self._seen
        self._seen.add(phase)
        self._allowed = max(self.seconds, SLOW_S if slow else 0)
        self._what, self._looks = f"{at}: {phase}" if at else phase, 0

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        pause = self.seconds / LOOKS
        while not self._closed.wait(pause):
            self._looks += 1
            if self._looks * pause >= self._allowed:
                failure.end_stalled(self.report)
                return

    def report(self) -> None:
        """Writes the stacks of all threads to stderr, and says why."""
        idle = self._looks * self.seconds / LOOKS
        line = one_line(
            f"error: rank {self.rank} has made no progress for {idle:.0f} s ({self._what}): all"
            " ranks end; the Python stacks of its threads are above"
        )
        print_report(f"{self.stacks()}\n{line}")
        tell_torchrun(line)

    def stacks(self) -> str:
        """Returns the Python stacks of all threads; reads no file, as a disk may be what hangs."""
        names, lines = {thread.ident: thread.name for thread in threading.enumerate()}, []
        for number, frame in sys._current_frames().items():
            lines.append(f"rank {self.rank}, {names.get(number)}, the innermost call first:")
            for inner, row in traceback.walk_stack(frame):
                code = inner.f_code
                lines.append(f"  {code.co_filename}:{row} in {code.co_name}")
        return "\n".join(lines)
