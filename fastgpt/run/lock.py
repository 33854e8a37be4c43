"""The lock on a run's directory."""

import os
import re
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fastgpt.errors import UserError, writing

WRITTEN = re.compile(r"\.lock|checkpoints|(config|manifest)\.json|metrics\.jsonl|.*\.(txt|png)")
"""Names of files and folders in a run that are known before it writes them."""


class RunLock:
    """Lock on a run's directory, held by the one process that may write there.

    The operating system releases it when the process ends.

    Args:
        instead: what the user may do if another process holds it, besides waiting.

    Raises:
        UserError: another process holds it, the directory cannot be written, or what the run writes
            is a symbolic link, which may lead out of the directory.
    """

    def __init__(self, path: Path, instead: str = "stop it") -> None:
        self.path, self._lock = path, FileLock(path / ".lock", thread_local=False)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            for file in path.iterdir():
                if file.is_symlink() and WRITTEN.fullmatch(file.name):
                    raise UserError(f"{file} is a symbolic link: expected that only {path} is one")
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                raise UserError(
                    f"{path} is in use: another process is training in this folder: wait until it"
                    f" ends, or {instead}"
                ) from None
            # of its own: it tells where the directory is even if that is moved
            self._file = (path / ".lock").open()

    @property
    def place(self) -> Path:
        """Path of the directory, which Linux knows even after that was moved."""
        with suppress(OSError):
            return Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}")).parent
        return self.path

    def check(self) -> None:
        """Raises `UserError` if directory or lock are no longer those that were opened."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self._lock.lock_file), os.fstat(self._file.fileno())):
                return
        lost = "has lost its .lock, so that another process may be training there"
        what = lost if self.path.exists() else "was moved or removed"
        raise UserError(f"{self.path} {what}: this run ends")

    def release(self) -> None:
        """Lets other processes train in the directory."""
        if self._lock.is_locked:
            self._file.close()
            self._lock.release()
