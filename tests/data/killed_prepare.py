"""Prepares a corpus in processes that kill themselves at each access to the disk.

`python -m tests.data.killed_prepare SOURCE FOLDER OPTIONS` prints its findings as JSON. It is a
process of its own because it forks, and a process that forks must have no threads.
"""

import builtins
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastgpt.data import reading, writing
from fastgpt.data.preparation import prepare
from fastgpt.data.shards import read_header
from tests.data.sets import contents

CHUNK_BYTES, BATCH_CHARACTERS = 40, 60


class Disk:
    """Counts writes, syncs, renames and removals; kills the process before number `last`."""

    def __init__(self, last: int) -> None:
        self.left = last
        for name in ("fsync", "replace", "unlink", "mkdir"):
            setattr(os, name, self.counted(getattr(os, name), skip=name == "fsync"))
        builtins.open = io.open = self.opened(io.open)

    def tick(self, half_done: Callable[[], object] = lambda: None) -> None:
        self.left -= 1
        if self.left == 0:
            half_done()
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, call: Callable[..., Any], *, skip: bool) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.tick()
            return None if skip else call(*args, **options)  # a killed process loses no page

        return run

    def opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        disk = self

        class Torn(io.FileIO):
            def write(self, data: Any) -> int:
                view = memoryview(data).cast("B")
                disk.tick(lambda: io.FileIO.write(self, view[: len(view) // 2]))
                return super().write(view)

            def truncate(self, size: int | None = None) -> int:
                disk.tick()
                return super().truncate(size)

        def run(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if mode in ("xb", "wb", "r+b"):
                disk.tick()
                return Torn(path, mode)
            return call(path, mode, *args, **options)

        return run


def killed(source: str, out: Path, options: dict[str, Any], last: int = 0) -> bool:
    """Prepares a corpus in a process killed at disk operation `last`; returns True if it was."""
    child = os.fork()
    if child == 0:
        Disk(last)
        try:
            prepare(source, out, workers=2, **options)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"failed at operation {last}")
    return os.WIFSIGNALED(status)


def looks_whole(out: Path, whole: dict[str, bytes]) -> list[str]:
    """Lists what has the name or the header of something finished but is not finished."""
    found = []
    if out.exists() and contents(out) != whole:
        found.append(str(out))
    for path in out.with_name(f"{out.name}.incomplete").glob("*.bin"):
        if path.read_bytes()[:4] not in (b"", bytes(4)):
            read_header(path)
            if path.read_bytes() != whole[path.name]:
                found.append(str(path))
    return found


def main(source: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    reading.CHUNK_BYTES, writing.BATCH_CHARACTERS = CHUNK_BYTES, BATCH_CHARACTERS
    killed(source, folder / "whole", options)
    whole, out = contents(folder / "whole"), folder / "out"
    kills, again, wrong = 0, 0, []
    while killed(source, out, options, last=kills + 1):
        kills += 1
        wrong += looks_whole(out, whole)
        if kills % 3 == 0 and not out.exists():  # once more, on the way to the end
            again += killed(source, out, options, last=1 + kills * 7 % 40)
            wrong += looks_whole(out, whole)
        killed(source, out, options)
        if contents(out) != whole or out.with_name("out.incomplete").exists():
            wrong.append(f"other files after {kills}")
        shutil.rmtree(out)
    return {"kills": kills, "again": again, "wrong": wrong, "files": sorted(whole)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))
