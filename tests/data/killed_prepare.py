"""Prepares a corpus in processes that kill themselves at each change of the disk.

`python -m tests.data.killed_prepare SOURCE FOLDER OPTIONS` prints its findings as JSON. It is a
process of its own because it forks, and a process that forks must have no threads.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from fastgpt.data import reading, writing
from fastgpt.data.preparation import prepare
from fastgpt.data.shards import read_header
from tests.data.sets import contents

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate")


def killed(source: str, out: Path, options: dict[str, Any], last: int = 0) -> bool:
    """Prepares in a process that is killed before its change number `last`; True if it was."""
    if not (child := os.fork()):
        left = last

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = lambda _: None  # a killed process loses no page
        sys.addaudithook(count)
        try:
            prepare(source, out, workers=2, **options)
        finally:
            os._exit(not (out / "manifest.json").exists())
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"failed at change {last}"
    return status == signal.SIGKILL


def looks_whole(out: Path, whole: dict[str, bytes]) -> list[str]:
    """Lists what has the name or the header of something finished but is not finished."""
    found = [str(out)] if out.exists() and contents(out) != whole else []
    for path in out.with_name(f"{out.name}.incomplete").glob("*.bin"):
        if path.read_bytes()[:4] not in (b"", bytes(4)):
            read_header(path)
            if path.read_bytes() != whole[path.name]:
                found.append(str(path))
    return found


def main(source: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    reading.CHUNK_BYTES, writing.BATCH_CHARACTERS = 40, 60
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
    return {"kills": kills, "again": again, "wrong": wrong, "files": len(whole)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))
