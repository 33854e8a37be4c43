"""What the machine gives: where files are kept, how they are written whole, how many cores."""

import os
import secrets
from pathlib import Path
from typing import BinaryIO


def data_dir() -> Path:
    """Where people put the files they have: `$FASTGPT_DATA`, else `./data`."""
    return Path(os.environ.get("FASTGPT_DATA") or "data")


def cache_dir() -> Path:
    """Where downloads and prepared corpora are kept: `$FASTGPT_CACHE`, else `~/.cache/fastgpt`."""
    return Path(os.environ.get("FASTGPT_CACHE") or Path.home() / ".cache" / "fastgpt")


def sync(file: BinaryIO) -> None:
    """Makes what was written to `file` survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Writes `parts` one after the other under a temporary name, syncs, and renames to `path`.

    A crash, a full disk or a second writer never leaves a half-written file named `path`.
    """
    path = Path(path)
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
            sync(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other process or call will take."""
    return path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def sync_directory(path: Path) -> None:
    """Makes the names in a folder survive a power cut, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
