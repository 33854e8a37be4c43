"""Kills processes at random moments: `python -m tests.faults.chaos` writes the record of 500 kills.

A work is begun, killed, and begun again by the same command until it ends by itself. Its result is
then compared with that of the same work without a kill. Processes are forked after all imports, so
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
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure  # noqa: F401 - so that not each fork imports it
import torch
import torch._dynamo
import tyro

from fastgpt import cli, prepare
from fastgpt.checkpoint import checkpoint
from fastgpt.data.corpus import MANIFEST, open_shards
from fastgpt.logs.metrics import read_records
from fastgpt.train import trainer  # noqa: F401 - as above
from tests.data.sets import texts, write_documents
from tests.processes import ROOT, free_port
from tests.runs import outcome

FORKS = get_context("fork")
RECORD = ROOT / "docs" / "chaos.json"
PATIENCE_S = 60.0
"""Seconds after which a process that should end by itself hangs."""
TINY = (
    "baby --model.num-layers 1 --model.num-heads 2 --model.dim 32 --model.context 16"
    " --train.device cpu --train.precision fp32 --train.batch-tokens 128 --train.sample-tokens 0"
    " --log-every 1 --eval-every 0 --resume auto --data.source text.txt --run-dir run"
)


class Fault(Exception):  # noqa: N818
    """Something was lost, or looked whole and was not, or hung, or stayed behind."""


# --- works ----------------------------------------------------------------------------------------


def train(flags: str, **environment: object) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    cli.main([*TINY.split(), *flags.split()])


def train_on_two_ranks(flags: str) -> None:
    """Starts both ranks, and sends SIGTERM to the other one when one fails, as torchrun does."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2}
    ranks = []
    for rank in range(2):
        own = shared | {"LOCAL_WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(FORKS.Process(target=train, args=(flags,), kwargs=own))
        ranks[-1].start()
    first, status = os.wait()
    if status:
        [other] = (rank.pid for rank in ranks if rank.pid != first)
        os.kill(other, signal.SIGTERM)
    sys.exit(bool(os.wait()[1] or status))


def tokenize() -> None:
    flags = "--out data --tokenizer bpe --vocab-size 400 --shard-tokens 4096 --workers 1"
    prepare.main(["documents.jsonl", *flags.split()])


class Work(NamedTuple):
    """Something that is killed until it is done, in the current folder."""

    start: Callable[[], None]
    most: int = 0
    """Steps that a kill may lose."""
    how: signal.Signals = signal.SIGKILL
    one_rank: bool = False
    """Kills a rank of the job, which must end by itself then, and not the whole job."""


def training(flags: str, most: int, **how: Any) -> Work:
    return Work(partial(train_on_two_ranks if "one_rank" in how else train, flags), most, **how)


# a checkpoint is written behind the next steps, so that two intervals can be lost
WORKS = {
    "training": training("--steps 160 --save-every 20", 40),
    # not by Muon, of which a step takes 2 s at this width on CPUs without products in bf16
    "saving": training("--steps 24 --save-every 1 --model.dim 256 --optim.kind adamw", 2),
    "evaluating": training("--steps 8 --eval-every 1 --save-every 4 --data.val-fraction 0.5", 8),
    "preparing": Work(tokenize),
    "two ranks": training("--steps 80 --save-every 20", 40, one_rank=True),
    "two ranks, saving parts": training(
        "--parallel.kind fsdp --steps 40 --save-every 2", 4, one_rank=True
    ),
    "stopping": training("--steps 160 --save-every 160", 0, how=signal.SIGTERM),
}


def begin(folder: Path) -> None:
    """Makes a folder with the inputs of all works the current one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    Path("log").touch()
    Path("text.txt").write_text("the cat sat on the mat, and the dog sat on the log. " * 400)
    write_documents(Path("documents.jsonl"), texts(20_000))


def result() -> object:
    """Returns what a work that is done has made."""
    if Path("data").exists():
        return {path.name: path.read_bytes() for path in Path("data").rglob("*.bin")}
    return outcome(Path("run"))


def steps_lost(most: int) -> int:
    """Reads all that looks whole, and counts the steps that were logged after the last one kept."""
    if Path("data", MANIFEST).exists():
        open_shards(Path("data"), tokenizer="auto")
    saved = checkpoint.steps_on_disk(Path("run/checkpoints"))
    last, metrics = max((checkpoint.load(path).step for path in saved), default=0), []
    if Path("run/metrics.jsonl").exists():
        metrics = read_records(Path("run/metrics.jsonl"))
    lost = max(0, max((record["step"] for record in metrics), default=0) - last)
    if lost > most:
        raise Fault(f"{lost} steps are lost: expected at most {most}")
    return lost


# --- kills ----------------------------------------------------------------------------------------


def in_session(start: Callable[[], None]) -> None:
    """Calls a function as the leader of a new session, which writes into the file `log`."""
    os.setsid()
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    start()


def killed(work: Work, after: float, draw: random.Random) -> float | None:
    """Does some of the work: seconds from the kill to the end of all its processes.

    Returns:
        float | None: None if the work was done before it was killed.

    Raises:
        Fault: it fails by itself, hangs, or leaves processes behind.
    """
    process = FORKS.Process(target=in_session, args=(work.start,))
    process.start()
    process.join(after)
    pid, began, allowed = process.pid, time.monotonic(), (0,)
    if process.exitcode is None:
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        targets = [*map(int, ranks)] if work.one_rank else [pid]
        allowed = (1, 0) if work.one_rank else (-work.how, 0)
        for target in draw.sample(targets, min(1, len(targets))):  # its ranks may not be there yet
            os.kill(target, work.how)
    left = not wait([process.sentinel], PATIENCE_S)  # its forks have the other end as well
    if left:
        os.killpg(pid, signal.SIGKILL)
    process.join()
    said, code = Path("log").read_text(), process.exitcode
    if left or code not in allowed:
        raise Fault(f"exit status {code}, processes were left: {left}: {said[-2000:]}")
    stopped = code == 0 and work.how == signal.SIGTERM and "to resume" in said
    return time.monotonic() - began if code or stopped else None


def run_work(work: Work, tries: int, folder: Path, draw: random.Random) -> dict[str, Any]:
    """Kills a work so many times, and returns what was seen."""
    begin(folder)
    start = time.monotonic()
    killed(work, PATIENCE_S, draw)
    duration, expected = time.monotonic() - start, result()
    begin(folder)
    seconds, lost, faults, done = [], [], [], False
    while not done:
        enough = len(seconds) + len(faults) >= tries
        try:
            took = killed(work, PATIENCE_S if enough else draw.uniform(0, duration), draw)
            if took is not None:
                seconds.append(took)
                lost.append(steps_lost(work.most))
                continue
            if result() != expected:
                raise Fault("the result is not that of the work without a kill")
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
            print(faults[-1], flush=True)
        begin(folder)
        done = enough
    return {
        "how": work.how.name, "one_rank": work.one_rank, "tries": tries, "faults": faults,
        "lost": sorted(lost), "seconds": sorted(round(x, 3) for x in seconds),
        "seconds_without": round(duration, 2),
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """Returns the record as a table of Markdown."""
    rows = [
        ("killed while", "by", "tries", "survived", "steps lost: median, most", "ended after"),
        ("---", "---", "--:", "--:", "--:", "--:"),
    ]
    for name, found in record.items():
        lost, seconds, tries = found["lost"], found["seconds"], found["tries"]
        steps = f"{statistics.median(lost):.0f}, {max(lost)}" if any(lost) else "0"
        took = f"{statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s"
        how = found["how"] + " of one rank" * found["one_rank"]
        rows.append((name, how, f"{tries}", f"{tries - len(found['faults'])}", steps, took))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(tries: int = 500, seed: int = 0, out: Path = RECORD) -> int:
    """Kills works at random moments; writes and prints a table."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    record = {}
    with tempfile.TemporaryDirectory() as place:
        os.environ["FASTGPT_CACHE"] = f"{place}/cache"
        for number, (name, work) in enumerate(WORKS.items()):
            share = (tries + number) // len(WORKS)  # they sum to the tries
            draw = random.Random(f"{seed} {name}")
            record[name] = run_work(work, share, Path(place, "work"), draw)
        os.chdir(ROOT)
    lines = (f"{json.dumps(name)}: {json.dumps(work)}" for name, work in record.items())
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(table(record))
    return int(any(found["faults"] for found in record.values()))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
