"""Raw records of measurements: one JSON line for each, with all that is needed to repeat it.

Each line has a `kind`: `op`, `step`, `missing`, `refused`, `machine`, `race`, `data`, `test`,
`environment`, `convergence`, `host`, `save`, `muon`, `generate`, `reproduction`, `tune`, `process`
(a run's phases), `training` (a run's losses), `resume` (a run beside a resumed one); and a `run`,
so that only figures of one run are ever compared.

A measurement writes into `bench/results/local/`, which git ignores; `publish` moves these records
beside the committed ones.
"""

import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fastgpt.commands import installed
from fastgpt.device import device
from fastgpt.run import manifest

RESULTS = Path(__file__).parent / "results"
LOCAL = "local"
"""Folder in `RESULTS` of unpublished records."""
PEERS = ("liger_kernel", "flash_attn", "flash_attn_3", "flash_attn_4")
ABOUT_GPU = ("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def slug(name: str) -> str:
    """Turns the name of a device into the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def state(on: str) -> dict[str, Any]:
    """Reads clocks, temperatures and load of the machine, as far as they are available."""
    if on == "cuda":
        found = _nvidia_smi()
        return {name: value for name, value in found.items() if name != "driver_version"}
    load = Path("/proc/loadavg")
    info = Path("/proc/cpuinfo")
    clocks = re.findall(r"cpu MHz\s*: ([\d.]+)", info.read_text()) if info.exists() else []
    zones = sorted(Path("/sys/class/thermal").glob("thermal_zone*/temp"))
    return {
        "mhz": [float(mhz) for mhz in clocks],
        "celsius": [int(zone.read_text()) / 1000 for zone in zones],
        **({"load": float(load.read_text().split()[0])} if load.exists() else {}),
    }


def _nvidia_smi() -> dict[str, str]:
    query = f"--query-gpu={','.join(ABOUT_GPU)}"
    index = str(torch.cuda.current_device())
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # nvidia-smi ignores it
        index = visible.split(",")[int(index)].strip()
    command = ["nvidia-smi", query, "--format=csv,noheader", "-i", index]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(ABOUT_GPU, (value.strip() for value in done.stdout.split(","))))


@functools.cache
def described(on: str) -> dict[str, Any]:
    """Returns device, driver, versions and commit, which every line carries."""
    facts = manifest.provenance()
    commit = facts["commit"] or "unknown"
    driver = _nvidia_smi().get("driver_version") if on == "cuda" else None
    peers = {name: version for name in PEERS if (version := installed(name)) is not None}
    slow = on == "cpu" and not device.fast_bf16(on)
    return {
        # CPUs of one name, rented in parts, differ in what limits a step most
        "device": device.device_name(on) + (", no bf16" if slow else ""),
        "on": on,
        "driver": driver,
        "versions": {**facts["versions"], **peers},
        "commit": commit.removesuffix("-dirty"),
        "dirty": commit.endswith("-dirty"),
    }


def folder_of(on: str) -> Path:
    """Returns the folder for measurements of this machine's `cpu` or `cuda`."""
    return RESULTS / LOCAL / slug(described(on)["device"])


class Writer:
    """Appends to `<folder>/<date>-<name>.jsonl`.

    Args:
        folder: `bench/results/local/<device>` by default.
        name: the commit by default; `tune` for the samples of the tuner.
        settings: settings of the whole run, written on every line.
    """

    def __init__(
        self, on: str, folder: Path | None = None, name: str = "", **settings: Any
    ) -> None:
        started = time.strftime("%Y-%m-%dT%H:%M:%S")
        if isa := os.environ.get("ONEDNN_MAX_CPU_ISA"):  # products use fewer instructions
            settings["isa"] = isa
        self.common = {"run": f"{started}-{os.getpid()}", **described(on), "settings": settings}
        folder = folder or folder_of(on)
        folder.mkdir(parents=True, exist_ok=True)
        name = name or self.common["commit"][:12]
        self.path = folder / f"{time.strftime('%Y-%m-%d')}-{name}.jsonl"

    def write(self, kind: str, *rows: dict[str, Any]) -> Path:
        """Writes a line for each row; returns the file."""
        with self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps({"kind": kind, **self.common, **row}) + "\n")
        return self.path


def publish() -> list[Path]:
    """Moves the local records beside the committed ones, and returns the files that it added to."""
    published = []
    for path in sorted((RESULTS / LOCAL).glob("*/*.jsonl")):
        target = RESULTS / path.relative_to(RESULTS / LOCAL)
        target.parent.mkdir(exist_ok=True)
        with target.open("a") as file:
            file.write(path.read_text())
        path.unlink()
        published.append(target)
    return published


def read(folder: Path | None = None) -> list[dict[str, Any]]:
    """Reads every record in `folder/<device>/`, oldest file first, with the `path` of its file.

    By default it reads the committed records.
    """
    folder = folder or RESULTS
    return [
        {**json.loads(line), "path": path}
        for path in sorted((*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")))
        for line in path.read_text().splitlines()
    ]


def show(header: str, lines: Iterable[Iterable[str]]) -> None:
    """Prints lines of figures as a table; `header` has its columns, with | between them."""
    table = Table(*header.split("|"))
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
