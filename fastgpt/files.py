"""Data and cache folders, atomic writes, JSON, and the number of cores."""

import hashlib
import json
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO


def data_dir() -> Path:
    """Returns the folder of the user's own data: `$FASTGPT_DATA`, else `./data`."""
    return Path(os.environ.get("FASTGPT_DATA") or "data")


def cache_dir() -> Path:
    """Returns the folder of downloads and caches: `$FASTGPT_CACHE`, else `~/.cache/fastgpt`."""
    return Path(os.environ.get("FASTGPT_CACHE") or Path.home() / ".cache" / "fastgpt")


def recall(name: str) -> dict[str, Any]:
    """Reads the JSON object `name` of the cache folder; an empty one if missing or damaged."""
    try:
        return dict(parse_json((cache_dir() / name).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def remember(name: str, known: dict[str, Any]) -> None:
    """Writes `known` as `name` into the cache folder, if that can be written to."""
    path = cache_dir() / name
    with suppress(OSError):  # the next process does the work again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(known, indent=1).encode())


def sync(file: BinaryIO) -> None:
    """Flushes `file` to the disk, so that it survives a power cut."""
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


def no_link(path: str, flags: int) -> int:
    """Opener for `open` that refuses a symbolic link, on systems that can."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def temporary_name(path: Path) -> Path:
    """Returns a hidden name beside `path` that no other process or call uses."""
    return path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def sync_directory(path: Path) -> None:
    """Flushes the names in a folder to the disk, on systems that can."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def parse_json(text: str) -> Any:
    """Parses JSON; all errors are ValueErrors, that of too deep nesting, too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def code_hash(*folders: Path) -> str:
    """Returns a hash of the code and tables in folders, as they are when this is first called."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted([*folder.rglob("*"), *(folder / "kernels").rglob("*")]):  # it is a link
            if path.suffix in (".py", ".json") and path.is_file():  # an editor's lock is none
                found.update(path.read_bytes())
    return found.hexdigest()


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
