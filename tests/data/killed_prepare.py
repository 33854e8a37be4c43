"""Prepares a text in processes that kill themselves, each at another change of the disk.

`python -m tests.data.killed_prepare SOURCE FOLDER` prints the number of kills. It is a process of
its own because it forks, and a process that forks must have no threads.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from fastgpt.data import reading, writing
from fastgpt.data.preparation import prepare
from tests.data.sets import contents

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate")


def killed(source: str, out: Path, last: int = 0) -> bool:
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
            prepare(source, out, tokenizer="chars", shard_tokens=50, val_fraction=0.3, workers=2)
        finally:
            os._exit(not (out / "manifest.json").exists())
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"failed at change {last}"
    return status == signal.SIGKILL


def main(source: str, folder: Path) -> None:
    reading.CHUNK_BYTES, writing.BATCH_CHARACTERS = 40, 60
    killed(source, folder / "whole")
    whole, out = contents(folder / "whole"), folder / "out"
    kills = 0
    while killed(source, out, kills + 1):
        kills += 1
        assert not out.exists() or contents(out) == whole, kills
        if kills % 3 == 0:  # the others are begun again by one that is killed, too
            killed(source, out)
            assert contents(out) == whole, kills
            assert not out.with_name("out.incomplete").exists()
            shutil.rmtree(out)
    assert contents(out) == whole
    print(kills)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
