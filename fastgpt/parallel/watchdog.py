"""Ends a run in which nothing happens any more, and says where each rank's threads are."""

import faulthandler
import os
import sys
import threading
from pathlib import Path

from fastgpt.errors import tell_torchrun
from fastgpt.parallel import failure
from fastgpt.terminal import one_line, print_line

SLOW_S = 1800.0
"""Least number of seconds allowed to what has no steps: compiling, a checkpoint, a sample."""
LOOKS = 20
"""Number of times that progress is looked for in the time allowed."""
WRITE_S = 5.0
"""Seconds in which a file of stacks must be written; its disk may be what hangs."""


class Watchdog:
    """Thread that ends all ranks after `seconds` without progress on this one.

    It counts its own looks and not seconds of a clock, so that a process that was stopped (Ctrl-Z)
    and goes on does not seem to have stalled. A rank whose thread cannot run, because native code
    keeps Python's lock or because it stays stopped, is noticed by the ranks that wait for it; it
    writes no stacks, and torchrun kills it 30 seconds after they have ended.

    Args:
        seconds: time allowed to a micro-step or an evaluation batch; 0: no limit.
        path: file for this rank's stacks.
        rank: rank of this process.
    """

    def __init__(self, seconds: float, path: Path, rank: int) -> None:
        self.seconds, self.path, self.rank = seconds, path, rank
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
        """Writes the stacks of all threads to the file, else to stderr, and says so on stderr."""
        written = threading.Event()
        threading.Thread(target=self._write, args=(written,), daemon=True).start()
        where = f"in {self.path}" if written.wait(WRITE_S) else "above"
        if not written.is_set():
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        idle = self._looks * self.seconds / LOOKS
        line = one_line(
            f"error: rank {self.rank} has made no progress for {idle:.0f} s ({self._what}): all"
            f" ranks end; the Python stacks of its threads are {where}"
        )
        print_line(line)
        tell_torchrun(line)

    def _write(self, written: threading.Event) -> None:
        try:
            with self.path.open("wb") as file:
                file.write(f"rank {self.rank}, process {os.getpid()}: {self._what}\n\n".encode())
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError:
            return
        written.set()
