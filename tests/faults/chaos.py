"""Kills processes at random moments: `python -m tests.faults.chaos` writes the record of 500 kills.

A work is begun, killed, and begun again by the same command until it ends by itself. Its result is
then compared with the same work's without a kill. Processes are forked after all imports, so
that most kills meet the work and not the start of Python.
"""

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from fastgpt import cli, prepare
from fastgpt.checkpoint import checkpoint
from fastgpt.data.corpus import MANIFEST, open_shards
from fastgpt.logs.metrics import read_records
from tests.data.sets import texts, write_documents
from tests.processes import FORKS, PRELOADED, ROOT, Job
from tests.runs import outcome

RECORD = ROOT / "docs" / "chaos.json"
PATIENCE_S = 60.0
"""Seconds after which a process that should end by itself hangs."""
TINY = (
    "baby --model.num-layers 1 --model.num-heads 2 --model.dim 32 --model.context 16"
    " --train.device cpu --train.precision fp32 --train.batch-tokens 128 --train.sample-tokens 0"
    " --log-every 1 --eval-every 0 --resume auto --data.source text.txt --run-dir run"
)


class Work(NamedTuple):
    """Something that is killed until it is done."""

    flags: str
    most: int = 0
    """Steps that a kill may lose."""
    how: signal.Signals = signal.SIGKILL
    ranks: int = 0
    """With ranks one of them is killed, and the job must end by itself then."""
    main: Callable[[list[str]], object] = cli.main


# a checkpoint is written behind the next steps, so that two intervals can be lost
WORKS = {
    "training": Work(f"{TINY} --steps 160 --save-every 20", 40),
    # not by Muon: a step takes 2 s at this width on CPUs without products in bf16
    "saving": Work(f"{TINY} --steps 24 --save-every 1 --model.dim 256 --optim.kind adamw", 2),
    "evaluating": Work(
        f"{TINY} --steps 8 --eval-every 1 --save-every 4 --data.val-fraction 0.5", 8
    ),
    "preparing": Work(
        "documents.jsonl --out data --tokenizer bpe --vocab-size 400 --shard-tokens 4096"
        " --workers 1",
        main=prepare.main,
    ),
    "two ranks": Work(f"{TINY} --steps 80 --save-every 20", 40, ranks=2),
    "two ranks, saving parts": Work(
        f"{TINY} --parallel.kind fsdp --steps 40 --save-every 2", 4, ranks=2
    ),
    "stopping": Work(f"{TINY} --steps 160 --save-every 160", how=signal.SIGTERM),
}


def begin(folder: Path) -> None:
    """Makes a folder with the inputs of all works."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "text.txt").write_text("the cat sat on the mat, and the dog sat on the log. " * 400)
    write_documents(folder / "documents.jsonl", texts(20_000))


def result(folder: Path) -> object:
    """Returns what a work that is done has made."""
    if (folder / "data").exists():
        return {path.name: path.read_bytes() for path in (folder / "data").rglob("*.bin")}
    return outcome(folder / "run")


def steps_lost(folder: Path, most: int) -> int:
    """Reads all that looks whole, and counts the steps that were logged after the last one kept."""
    if (folder / "data" / MANIFEST).exists():
        open_shards(folder / "data", tokenizer="auto")
    saved = checkpoint.steps_on_disk(folder / "run" / "checkpoints")
    last, metrics = max((checkpoint.load(path).step for path in saved), default=0), []
    if (folder / "run" / "metrics.jsonl").exists():
        metrics = read_records(folder / "run" / "metrics.jsonl")
    lost = max(0, max((record["step"] for record in metrics), default=0) - last)
    assert lost <= most, f"{lost} steps are lost: expected at most {most}"
    return lost


def killed(work: Work, after: float, folder: Path, draw: random.Random) -> float | None:
    """Does some of the work; asserts that it neither fails by itself nor hangs.

    Returns:
        float | None: seconds from the kill to the end of all processes; None if the work was done.
    """
    with Job(work.ranks, work.main, work.flags.split(), cwd=folder) as job:
        ended, began = job.ended(after), time.monotonic()
        if not ended:
            with suppress(OSError):  # it has ended since
                targets = job.ranks() if work.ranks else [job.pid]
                for target in draw.sample(targets, min(1, len(targets))):  # ranks may begin later
                    os.kill(target, work.how)
        status, out, err = job.end(PATIENCE_S)
    assert status in (0, 1 if work.ranks else -work.how), f"exit status {status}: {err[-2000:]}"
    stopped = work.how == signal.SIGTERM and "to resume" in out
    return time.monotonic() - began if status or stopped else None


def run_work(work: Work, tries: int, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Kills a work so many times, and returns what was seen."""
    begin(folder)
    start = time.monotonic()
    killed(work, PATIENCE_S, folder, draw)
    duration, expected = time.monotonic() - start, result(folder)
    begin(folder)
    seconds, lost, faults, enough = [], [], [], False
    while not enough:
        enough = len(seconds) + len(faults) >= tries
        try:
            after = PATIENCE_S if enough else draw.uniform(0, duration)
            if (took := killed(work, after, folder, draw)) is not None:
                seconds.append(took)
                lost.append(steps_lost(folder, work.most))
                continue
            assert result(folder) == expected, "the result differs from the work without a kill"
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
        begin(folder)
    return {
        "how": work.how.name, "one_rank": work.ranks > 0, "tries": tries, "faults": faults,
        "lost": sorted(lost), "seconds": sorted(round(x, 3) for x in seconds),
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """Returns the record as a table of Markdown."""
    rows = [
        "| killed while | by | tries | survived | steps lost: median, most | ended after |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    for name, found in record.items():
        lost, seconds, tries = found["lost"], found["seconds"], found["tries"]
        steps = f"{statistics.median(lost):.0f}, {max(lost)}" if any(lost) else "0"
        took = f"{statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s"
        how = found["how"] + " of one rank" * found["one_rank"]
        survived = tries - len(found["faults"])
        rows.append(f"| {name} | {how} | {tries} | {survived} | {steps} | {took} |")
    return "\n".join(rows)


def main(tries: int = 500, seed: int = 0, out: Path = RECORD) -> int:
    """Kills works at random moments; writes and prints a table."""
    FORKS.set_forkserver_preload([*PRELOADED, "fastgpt.prepare", "tests.data.sets", "tests.runs"])
    record = {}
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"FASTGPT_CACHE": f"{place}/cache", "OMP_NUM_THREADS": "1"}
        for number, (name, work) in enumerate(WORKS.items()):
            share = (tries + number) // len(WORKS)  # they sum to the tries
            draw = random.Random(f"{seed} {name}")
            record[name] = run_work(work, share, Path(place, "work"), draw)
    lines = (f"{json.dumps(name)}: {json.dumps(work)}" for name, work in record.items())
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(table(record))
    return int(any(found["faults"] for found in record.values()))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
