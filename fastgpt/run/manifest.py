"""Manifest of a run: its command, versions, commit and what a resume changed."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import fastgpt
from fastgpt.commands import installed
from fastgpt.config.config import Config
from fastgpt.device.device import DTYPES, fast_bf16
from fastgpt.errors import writing
from fastgpt.files import parse_json, write_atomically


def write(path: Path, facts: dict[str, Any]) -> None:
    """Writes the manifest of a run, with what it depends on besides its config.

    Args:
        path: file, which is there already if the run is resumed. Each resume adds an entry to it,
            with the command and what differs from the first start.
        facts: facts about this start of the run, besides the command and `provenance`.

    Raises:
        UserError: it cannot be written.
    """
    found = now = {"command": sys.argv, **provenance(), **facts}
    with suppress(OSError, ValueError, TypeError, AttributeError):  # damaged: nothing is left
        first = parse_json(path.read_text())
        resumed = {name: x for name, x in now.items() if name == "command" or x != first.get(name)}
        found = first | {"resumes": [*first.get("resumes", []), resumed]}
    with writing(path):
        write_atomically(path, json.dumps(found, indent=1).encode())


def precision_asked(config: Config, on: str, warn: Callable[[str], None]) -> str:
    """Returns `train.precision`, or for `auto` that with which a run on CPUs began.

    So it goes on with the same arithmetic on a CPU with other instructions.

    Args:
        on: kind of device; on any other than `cpu` the run follows the device.
        warn: called with one line if that is slow here.
    """
    asked = config.train.precision
    if asked != "auto" or on != "cpu" or config.resume is None:
        return asked
    resumed = Path(config.resume).absolute()  # a run, or a checkpoint in one
    for run in (resumed, *resumed.parents[1:2]):
        with suppress(OSError, ValueError, TypeError, LookupError):  # none, an older one, damaged
            begun = parse_json((run / "manifest.json").read_text())
            if begun["on"] == on and begun["precision"] in DTYPES:
                asked = begun["precision"]
                break
    if asked == "bf16" and not fast_bf16(on):
        warn(
            "the run began in bf16, which this CPU emulates: --train.precision fp32 is faster, but"
            " its losses differ by rounding"
        )
    return asked


def provenance() -> dict[str, Any]:
    """Returns the versions of Python, PyTorch, Triton and CUDA, and the commit of this checkout."""
    versions = {
        "fastgpt": fastgpt.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
    }
    return {"versions": versions, "commit": _commit()}


def _commit() -> str | None:
    """Returns the checkout's commit, with `-dirty` if files differ from it.

    Outside a checkout it is $FASTGPT_COMMIT, for copies without .git; None if that is not set.
    """
    root = Path(__file__).parents[2]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FASTGPT_COMMIT") or None
    return described.stdout.strip()
