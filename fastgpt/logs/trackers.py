"""Trackers show a run in TensorBoard, Weights & Biases or Trackio, each from its own process.

It reads what the run writes into its folder, so that nothing in it can hold up or end the run.
"""

import json
import os
import re
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from fastgpt.errors import brief
from fastgpt.files import write_atomically
from fastgpt.logs.metrics import CLOSE_S, read_records
from fastgpt.terminal import print_line

LOOK_S = 5.0
"""Seconds between two looks at the files of a run: one takes 7 ms for a thousand records."""
SAMPLE = re.compile(r"^=== step (\d+) ===\n(.*?)\n\n(?=\Z|=== step \d+ ===\n)", re.M | re.S)
Tracker = tuple[Callable[[dict[str, Any], int], Any], Callable[[], Any]]
"""A function that shows numbers and texts of a step, by name, and one that completes them."""


def tensorboard(run: Path, settings: dict[str, Any], after: int) -> Tracker:
    """Writes event files, without PyTorch's writer, which takes seconds to import."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    Event = import_module("tensorboard.compat.proto.event_pb2").Event  # made at run time

    def show(figures: dict[str, Any], step: int) -> None:
        values = []
        for name, x in figures.items():
            text = {"dtype": "DT_STRING", "string_val": [f"```\n{x}\n```".encode()]}
            shown = {"tensor": text, "metadata": {"plugin_data": {"plugin_name": "text"}}}
            values.append({"tag": name, **(shown if isinstance(x, str) else {"simple_value": x})})
        file.add_event(Event(wall_time=time.time(), step=step, summary={"value": values}))
        file.flush()  # raises an error of the writer's thread

    file = EventFileWriter(str(run))
    # hides what earlier files have after that step
    file.add_event(Event(step=after + 1, session_log={"status": "START"}))
    show({"config": json.dumps(settings, indent=1)}, max(after, 0))
    return show, file.close


def hosted(name: str, run: Path, settings: dict[str, Any], id: str) -> Tracker:
    """Shows a run in wandb, or in trackio, which has the same functions."""
    package, project = import_module(name), os.environ.get(f"{name.upper()}_PROJECT", "fastgpt")
    given = {"name": f"{run.name}-{id}", "config": settings, "resume": "allow"}
    where = f"`trackio show --project {project}` shows this run, {run.name}-{id}"
    if name == "wandb":
        known = "WANDB_MODE" in os.environ or package.login(prompt=False, verify=False)
        given |= {"id": id, "dir": run, "mode": None if known else "offline"}
        given["settings"] = package.Settings(console="off", silent=True)
        why = "" if known else "no login was found; "
        where = f"{why}`wandb sync {run}/wandb/offline-*` uploads this run"
    begun = package.init(project=project, **given)
    print_line(f"{name}: {where if getattr(begun, 'offline', True) else begun.url}")

    def show(figures: dict[str, Any], step: int) -> None:
        texts = {key: x for key, x in figures.items() if isinstance(x, str)}
        pages = {key: package.Html(f"<pre>{escape(x)}</pre>") for key, x in texts.items()}
        begun.log(figures | pages, step=step)

    return show, begun.finish


def follow(name: str, run: Path, from_step: int) -> None:
    """Shows a run until standard input ends; `NAME.tracked` has its id and what was shown last."""
    state, samples, goes_on = run / f"{name}.tracked", run / "samples.txt", True
    id, last = json.loads(state.read_text()) if state.exists() else (secrets.token_hex(4), [-1, 0])
    settings = json.loads((run / "config.json").read_text())
    if name == "tensorboard":
        last = min(last, [from_step, 2])  # what follows replaces what it has shown
        show, close = tensorboard(run, settings, last[0])
    else:
        show, close = hosted(name, run, settings, id)
    while goes_on:
        goes_on = not select.select([sys.stdin], [], [], LOOK_S)[0]
        signal.alarm(0 if goes_on else int(CLOSE_S))  # the run itself may have been killed
        new = [([r.pop("step"), "val_loss" in r], r) for r in read_records(run / "metrics.jsonl")]
        evaluated = {step for (step, evaluation), _ in new if evaluation}
        found = SAMPLE.findall(samples.read_text(errors="replace")) if samples.exists() else ()
        new += [([int(step), 2], {"sample": x}) for step, x in found if int(step) in evaluated]
        new = sorted((x for x in new if x[0] > last), key=lambda x: x[0])
        if new:
            last = new[-1][0]
            write_atomically(state, json.dumps([id, last]).encode())
        for (step, _), record in new:
            lists = [(name, x) for name, x in record.items() if isinstance(x, list)]
            record |= {f"{name}/{i}": x for name, values in lists for i, x in enumerate(values)}
            show({k: x for k, x in record.items() if isinstance(x, float | int | str)}, step)
    close()


if __name__ == "__main__":
    os.nice(10)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # batch systems send them to all processes
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    except Exception as error:
        print_line(f"warning: {sys.argv[1]} is turned off, training goes on: {brief(error)}")
