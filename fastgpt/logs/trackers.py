"""Trackers show a run in TensorBoard, Weights & Biases or Trackio, each from its own process.

It reads what the run writes into its folder, so that nothing in it can hold up or end the run.
"""

import faulthandler
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fastgpt.errors import brief
from fastgpt.files import write_atomically
from fastgpt.logs.metrics import CLOSE_S, parse_records
from fastgpt.terminal import print_line

SHOWN = {
    "train_loss": "loss/train", "val_loss": "loss/val", "val_losses": "loss/val_corpus",
    "val_loss_compared": "loss/val_compared", "eval_train_loss": "loss/eval_train",
    "val_bits_per_byte": "loss/val_bits_per_byte",
    **{name: f"optim/{name}" for name in ("lr", "muon_lr", "grad_norm")},
    **{name: f"speed/{name}" for name in ("tok_per_s", "mfu", "data_wait", "peak_memory_gib")},
}  # fmt: skip
"""Names that trackers show, grouped so that losses come first; all others are in `run`."""
LOOK_S = 5.0
"""Seconds between two looks at the records of a run."""
Tracker = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]
"""A function that shows numbers of a step, by name, and one that completes them."""


def tensorboard(run: Path) -> Tracker:
    """Writes an event file, without PyTorch's writer, which takes seconds to import."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    Event = import_module("tensorboard.compat.proto.event_pb2").Event  # made at run time

    def show(figures: dict[str, float], step: int) -> None:
        wall = figures.pop("run/time", time.time())
        values = [{"tag": name, "simple_value": x} for name, x in figures.items()]
        file.add_event(Event(wall_time=wall, step=step, summary={"value": values}))
        file.flush()  # raises an error of the writer's thread

    file = EventFileWriter(str(run))
    file.add_event(Event(session_log={"status": "START"}))  # hides what earlier files have
    return show, file.close


def hosted(name: str, run: Path, id: str) -> Tracker:
    """Shows a run in wandb, or in trackio, which has the same functions."""
    package, project = import_module(name), os.environ.get(f"{name.upper()}_PROJECT", "fastgpt")
    given = {"name": f"{run.name}-{id}", "config": json.loads((run / "config.json").read_text())}
    if name == "wandb":
        known = "WANDB_MODE" in os.environ or package.login(prompt=False, verify=False)
        given |= {"id": id, "dir": run, "mode": None if known else "offline"}
        given["settings"] = package.Settings(console="off", silent=True)
    begun = package.init(project=project, resume="allow", **given)
    url = None if getattr(begun, "offline", False) else getattr(begun, "url", None)
    where = url or "which is kept here (docs/tracking.md)"
    print_line(f"{name}: {run.name}-{id} of the project {project}, {where}")
    return lambda figures, step: begun.log(figures, step=step), begun.finish


def follow(name: str, run: Path) -> None:
    """Shows a run until standard input ends; `NAME.tracked` has its id and what was shown last."""
    state, ended = run / f"{name}.tracked", threading.Event()
    id, last = json.loads(state.read_text()) if state.exists() else (secrets.token_hex(4), [])
    last = [] if name == "tensorboard" else last  # which shows all again, in place of what it has
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    show, close = tensorboard(run) if name == "tensorboard" else hosted(name, run, id)
    rest, goes_on = "", True
    with (run / "metrics.jsonl").open(errors="replace") as file:
        while goes_on:
            goes_on = not ended.wait(LOOK_S)
            lines, _, rest = (rest + file.read()).rpartition("\n")
            records = ([[r.pop("step"), "val_loss" in r], r] for r in parse_records(lines))
            new = [(at, r) for at, r in records if at > last]
            if new:
                last = new[-1][0]
                write_atomically(state, json.dumps([id, last]).encode())
            for (step, _), record in new:
                show(figures(record), step)
    close()


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record, and those of its lists, by the names that are shown."""
    named = {SHOWN.get(key, f"run/{key}"): x for key, x in record.items()}
    lists = [(name, x) for name, x in named.items() if isinstance(x, list)]
    named |= {f"{name}/{i}": x for name, values in lists for i, x in enumerate(values)}
    return {name: x for name, x in named.items() if isinstance(x, float | int)}


def _await_end(ended: threading.Event) -> None:
    """Waits in a thread for the end of standard input, as select does not know Windows' pipes."""
    os.read(0, 1)  # sys.stdin would be locked, should Python end before the run
    faulthandler.dump_traceback_later(CLOSE_S, exit=True, file=sys.stdout)  # the run may be killed
    ended.set()


if __name__ == "__main__":
    getattr(os, "nice", int)(10)
    for signalled in {"SIGINT", "SIGTERM", "SIGUSR1", "SIGBREAK"} & {*dir(signal)}:
        signal.signal(getattr(signal, signalled), signal.SIG_IGN)  # all processes get them
    try:
        follow(sys.argv[1], Path(sys.argv[2]))
    except Exception as error:
        print_line(f"warning: {sys.argv[1]} is turned off, training goes on: {brief(error)}")
