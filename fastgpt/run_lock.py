"""The lock on a run's directory."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fastgpt.errors import UserError, writing
from fastgpt.storage import sync, write_atomically

WRITTEN = (
    ".lock", ".holder", "checkpoints", "config.json", "manifest.json", "metrics.jsonl",
    "samples.txt", "loss.png", "stalled-rank-*.txt",
)  # fmt: skip
"""What a run writes under names that are known before."""


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
                if file.is_symlink() and any(map(file.match, WRITTEN)):
                    raise UserError(
                        f"{file} is a symbolic link, and the run would write where it leads: put"
                        " the file itself there (the run's whole folder may be a link)"
                    )
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
            try:
                with self._holder.open("xb") as file:
                    file.write(self._mine.encode())
                    sync(file)
            except FileExistsError:
                self._take_over(host, job)

    def _take_over(self, host: str, job: str) -> None:
        held_by = self._held_by()
        same_job = job != "none" and held_by.endswith(f" in job {job}")
        if not same_job and f" on {host} " not in f"{held_by} ":
            self._lock.release()
            raise UserError(
                f"{self.path} was last used by {held_by or 'an unknown process'}, and {host} cannot"
                f" see whether that still runs: if it has ended, delete {self._holder} and try"
                " again"
            )
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
        here = False
        with suppress(OSError):
            found = os.stat(self._lock.lock_file)
            here = os.path.samestat(found, os.fstat(self._file.fileno()))
            here &= self._held_by() == self._mine
        if not here and self.path.exists():
            raise UserError(
                f".lock or .holder in {self.path} was removed or replaced during the run, so that"
                " another process may be training there: this one ends"
            )
        if not here:
            raise UserError(f"{self.path} was moved or removed during the run")

    def release(self) -> None:
        """Lets other processes train in the directory."""
        if self._lock.is_locked:
            with suppress(OSError, UserError):
                self.check()
                self._holder.unlink()
            self._file.close()
            self._lock.release()
