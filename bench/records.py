"""Raw records: one JSON line a measurement, with everything that it takes to repeat it."""

import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

from fastgpt import device, run

RESULTS = Path(__file__).parent / "results"


def quantiles(samples: list[float]) -> dict[str, float]:
    """p20, p50 and p80 of at least two samples, and how many there were."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return {"p20": deciles[1], "p50": deciles[4], "p80": deciles[7], "samples": len(samples)}


def folder_of(on: str) -> Path:
    """Where the records of this machine's `cpu` or `cuda` are kept."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", device.device_name(on).lower()).strip("-")


def write(name: str, on: str, rows: list[dict[str, Any]]) -> Path:
    """Appends `rows` to `results/<device>/<date>-<name>.jsonl`, each with device, versions, commit.

    Args:
        name: of the measurement.
        on: `cpu` or `cuda`.
        rows: what was measured.
    """
    described, folder = device.device_name(on), folder_of(on)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y-%m-%d')}-{name}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({"device": described, **run.provenance(), **row}) + "\n")
    return path
