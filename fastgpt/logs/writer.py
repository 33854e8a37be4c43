"""Writes to logs in a thread, so that a full, slow or broken disk never stops training."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from fastgpt.errors import UserError, brief, counted, writing

MOST_WAITING = 10_000
"""Number of writes that may wait for a slow disk; further ones are dropped."""
PATIENCE_S = 60.0
"""Seconds in which the last writes must be done when a run ends."""


class LogWriter:
    """Thread that runs writes one after the other; the first failure is a warning, all are counted.

    Args:
        warn: called with a warning, one line long.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn, self.lost = warn, 0
        self._jobs: queue.Queue[tuple[Path, Callable[[], object]] | None] = queue.Queue(
            MOST_WAITING
        )
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def start(self, path: Path, job: Callable[[], object]) -> None:
        """Queues a write to `path`, and never waits."""
        try:
            self._jobs.put_nowait((path, job))
        except queue.Full:
            self._lose("their disk does not keep up")

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            path, job = task
            try:
                with writing(path):
                    job()
            except UserError as error:
                self._lose(str(error))
            except Exception as error:  # whatever a tracker raises
                self._lose(brief(error))

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.warn(f"the logs cannot be written ({why}): training goes on")
        self.lost += 1

    def close(self) -> None:
        """Waits for the last writes, and says how many were lost."""
        try:
            self._jobs.put(None, timeout=PATIENCE_S)
            self._thread.join(PATIENCE_S)
        except queue.Full:
            pass
        lost = self.lost + (self._jobs.qsize() if self._thread.is_alive() else 0)
        if lost or self._thread.is_alive():
            self.warn(f"the logs are not complete: {counted(lost, 'write')} to them failed")
