"""Records of measurements: one line of JSON for each case and implementation.

A measurement adds lines to `bench/results/local/<machine>.jsonl`, which git ignores. `publish`
moves them into `bench/results/<machine>.jsonl`, which holds the newest run of each case. Older
runs are in git's history. A machine is a kind: CPUs or GPUs of one name and number.
"""

import functools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fastgpt.commands import installed
from fastgpt.device import device
from fastgpt.errors import UserError
from fastgpt.files import write_atomically
from fastgpt.run import manifest

RESULTS = Path(__file__).parent / "results"
LOCAL = "local"  # folder in RESULTS of unpublished records
PEERS = ("liger_kernel", "flash_attn", "flash_attn_3", "flash_attn_4", "transformers")
ABOUT_GPU = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
OVER_BUDGET = "over the budget"

Record = dict[str, Any]
"""A measurement, as `record` makes it."""


def record(
    case: str, implementation: str, figure: dict[str, float] | None = None, *,
    unit: str = "s", why: str = "", **more: Any,
) -> Record:  # fmt: skip
    """Makes a record.

    Args:
        case: what was measured, such as `layer_norm/gpt2-124m/bf16/fwd` or `step/baby/B=16`.
        implementation: who did it; `ours` or a name that begins with fastgpt is this project.
        figure: quantiles p20, p50 and p80, and the number of `samples`; None if there is none.
        why: reason why there is no figure.
        more: what else this kind of case has.
    """
    assert (figure is None) == bool(why), (case, implementation)
    about = {"case": case, "implementation": implementation}
    return {**about, "figure": figure, "unit": unit, **({"why": why} if why else {}), **more}


def is_ours(row: Record) -> bool:
    """Returns True for a record of our op or of one of fastgpt's trainers."""
    return row["implementation"] == "ours" or row["implementation"].startswith("fastgpt")


def failed(row: Record) -> bool:
    """Returns True for a case of an op that ours failed: wrong results, or an error."""
    ours = row["implementation"] in ("ours", "all")  # `all` if the case itself fails
    return ours and row["figure"] is None and not row["why"].startswith(OVER_BUDGET)


def slug(name: str) -> str:
    """Turns the name of a device into the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def state(on: str) -> dict[str, Any]:
    """Reads a GPU's clocks, temperature and power, or a CPU's load."""
    if on == "cuda":
        return _nvidia_smi(*ABOUT_GPU)
    return {"load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}


def _nvidia_smi(*fields: str) -> dict[str, str]:
    index = str(torch.cuda.current_device())
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # nvidia-smi ignores it
        index = visible.split(",")[int(index)].strip()
    query = f"--query-gpu={','.join(fields)}"
    command = ["nvidia-smi", query, "--format=csv,noheader", "-i", index]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return dict(zip(fields, map(str.strip, done.stdout.split(","))))
    return {}


@functools.cache
def described(on: str) -> dict[str, Any]:
    """Returns device, driver, versions and commit, which every line of a record carries."""
    facts, name = manifest.provenance(), device.device_name(on)
    # CPUs of one name, rented in parts, differ in what limits a step most
    name += ", no bf16" * (on == "cpu" and not device.fast_bf16(on))
    if isa := os.environ.get("ONEDNN_MAX_CPU_ISA"):  # products use fewer instructions
        name += f", {isa}"
    versions = facts["versions"] | {peer: installed(peer) for peer in PEERS}
    driver = _nvidia_smi("driver_version") if on == "cuda" else {}
    return {
        "device": name, "on": on, **({"driver": driver["driver_version"]} if driver else {}),
        "versions": {package: version for package, version in versions.items() if version},
        "commit": facts["commit"] or "unknown",
    }  # fmt: skip


class Writer:
    """Adds lines with a run's settings to a file in `out`, by default `bench/results/local`.

    A run with the setting `rough` is not published.
    """

    def __init__(self, on: str, out: Path | None = None, **settings: Any) -> None:
        run = f"{time.strftime('%Y-%m-%dT%H:%M:%S')}-{os.getpid()}"
        self.common = {"run": run, **described(on), "settings": settings}
        folder = out or RESULTS / LOCAL
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{slug(described(on)['device'])}.jsonl"

    def write(self, *rows: Record) -> Path:
        """Adds a line for each record; returns the file."""
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                # begins a line, since a killed run may have left one unfinished
                file.write("\n" + json.dumps({**row, **self.common}))
        return self.path


def read(folder: Path | None = None, name: str = "*.jsonl") -> list[Record]:
    """Reads the records of every machine in a folder, by default the committed ones.

    A line that a killed process left unfinished does not count.
    """
    found = []
    for path in sorted((folder or RESULTS).glob(name)):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def grouped(rows: Iterable[Record], key: str) -> dict[str, list[Record]]:
    """Returns the records by their value of a key."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def newest(rows: list[Record]) -> list[Record]:
    """Returns the records of the newest run of each device and case.

    A run does not replace an earlier one that timed an implementation which it has not timed.
    """
    kept = list[Record]()
    for of_device in grouped(rows, "device").values():
        for of_case in grouped(of_device, "case").values():
            best, timed = list[Record](), set[str]()
            for _, run in sorted(grouped(of_case, "run").items()):  # a run's name is its time
                now = {row["implementation"] for row in run if row["figure"]}
                if timed <= now:
                    best, timed = run, now
            kept += best
    return kept


def publish() -> None:
    """Moves the local records into the committed files, which keep the newest run of each case.

    Raises:
        UserError: an op of ours failed in a local record; nothing is moved.
    """
    for path in sorted((RESULTS / LOCAL).glob("*.jsonl")):
        local = [
            row for row in read(path.parent, path.name) if not row.get("settings", {}).get("rough")
        ]
        if wrong := next(filter(failed, newest(local)), None):
            raise UserError(f"nothing is published: ours failed {wrong['case']}: {wrong['why']}")
        kept = newest(read(RESULTS, path.name) + local)
        runs = {(row["device"], row["case"]): row["run"] for row in kept}
        newer = (row for row in local if row["run"] > runs[row["device"], row["case"]])
        left = grouped(newer, "case")
        if left:
            print("not published, since the record has more implementations:", *left)
        for target, rows in ((RESULTS / path.name, kept), (path, chain(*left.values()))):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(target, lines.encode())
