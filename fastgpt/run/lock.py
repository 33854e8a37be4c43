"""The lock on a run's directory."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fastgpt.errors import UserError, writing
from fastgpt.files import sync, write_atomically

WRITTEN = re.compile(
    r"\.lock|\.holder|checkpoints|(config|manifest)\.json|metrics\.jsonl|.*\.(txt|png)"
)
"""Names of files and folders in a run that are known before it writes them."""


class RunLock:
    """Lock on a run's directory, held by the one process that may write there.

    The operating system releases it when the process ends. Hosts that share a disk may not see each
    other's locks, so the file `.holder`, which only one process can create, names the process, its
    host, and torchrun's job (`--rdzv-id`), whose restart on another host may go on.

    Args:
        instead: what the user may do if another process holds it, besides waiting.

    Raises:
        UserError: another process holds it, the directory cannot be written, or what the run writes
            is a symbolic link, which may lead out of the directory.
    """

    def __init__(self, path: Path, instead: str = "stop it") -> None:
        self.path, self._holder = path, path / ".holder"
        self._lock = FileLock(path / ".lock", thread_local=False)
        host, job = platform.node(), os.environ.get("TORCHELASTIC_RUN_ID", "none")
        self._mine = f"process {os.getpid()} on {host}" + f" in job {job}" * (job != "none")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            for file in path.iterdir():
                if file.is_symlink() and WRITTEN.fullmatch(file.name):
                    raise UserError(f"{file} is a symbolic link: expected that only {path} is one")
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                holder = self._held_by().removeprefix("process ")
                raise UserError(
                    f"{path} is in use: another process{f' ({holder})' * bool(holder)} is training"
                    f" in this folder: wait until it ends, or {instead}"
                ) from None
            # of its own: it tells where the directory is even if that is moved
            self._file = (path / ".lock").open()
            with suppress(FileExistsError), self._holder.open("xb") as file:
                file.write(self._mine.encode())
                sync(file)
            held_by = self._held_by()
            same_job = job != "none" and held_by.endswith(f" in job {job}")
            if not same_job and f" on {host} " not in f"{held_by} ":
                self._lock.release()
                raise UserError(
                    f"{path} was last used by {held_by or 'an unknown process'}, and {host} cannot"
                    f" see whether that still runs: if it has ended, delete {self._holder} and try"
                    " again"
                )
            if held_by != self._mine:
                write_atomically(self._holder, self._mine.encode())

    def _held_by(self) -> str:
        """Returns the process that the file names; empty if it is missing or damaged."""
        text = self._holder.read_text(errors="replace") if self._holder.exists() else ""
        whole = re.fullmatch(r"process \d+ on .*", text) and text.isprintable()
        return text if whole else ""

    @property
    def place(self) -> Path:
        """Path of the directory, which Linux knows even after that was moved."""
        with suppress(OSError):
            return Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}")).parent
        return self.path

    def check(self) -> None:
        """Raises `UserError` if directory or lock are no longer those that were opened."""
        with suppress(OSError):
            found, own = os.stat(self._lock.lock_file), os.fstat(self._file.fileno())
            if os.path.samestat(found, own) and self._held_by() == self._mine:
                return
        lost = "lost its .lock or .holder, so that another process may be training there"
        what = f"has {lost}" if self.path.exists() else "was moved or removed"
        raise UserError(f"{self.path} {what}: this run ends")

    def release(self) -> None:
        """Lets other processes train in the directory."""
        if self._lock.is_locked:
            with suppress(OSError, UserError):
                self.check()
                self._holder.unlink()
            self._file.close()
            self._lock.release()
