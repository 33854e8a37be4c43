"""Why torch sees no CUDA device on a machine with an NVIDIA GPU, and what to install."""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

NEEDED = {11: 450, 12: 525, 13: 580}
"""Oldest branch of NVIDIA's driver for each major version of CUDA (NVIDIA, "CUDA Compatibility",
Minor Version Compatibility, table 1)."""
LOADED = Path("/proc/driver/nvidia/version")
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI's number of the vendor, and the first digits of the class of graphics devices."""


def why_no_cuda() -> str | None:
    """Explains why torch sees no CUDA device, and what to install.

    Returns:
        str | None: None if there is no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides all of them.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    driver, built = loaded_driver(), torch.version.cuda
    if driver is None and not _has_gpu():
        return None
    which = "without a loaded driver" if driver is None else f"with driver {driver}"
    here = f"this machine has an NVIDIA GPU {which}, but torch {torch.__version__}"
    if built is None:
        return f"{here} is built without CUDA: install a CUDA build of torch (pytorch.org)"
    major = int(built.split(".")[0])
    least = f"NVIDIA's driver {NEEDED[major]}" if major in NEEDED else "the driver of its version"
    here = f"{here} is built for CUDA {built}"
    if driver is None:
        return f"{here}: install {least} or newer"
    branch = int(driver.split(".")[0])
    if branch < NEEDED.get(major, 0):
        usable = [known for known, oldest in NEEDED.items() if oldest <= branch]
        older = f", or a torch for CUDA {max(usable)}" if usable else ""
        return f"{here}: install {least} or newer{older}"
    return f"{here} and cannot use it: see nvidia-smi; a container must be given its GPUs"


def loaded_driver() -> str | None:
    """Returns the version of NVIDIA's loaded kernel driver, such as 535.104.05; None without one.

    Windows and WSL have no such file in /proc: nvidia-smi is asked there.
    """
    said = ""
    with suppress(OSError):
        said = LOADED.read_text(encoding="utf-8").split("\n")[0]
    if not said and (command := shutil.which("nvidia-smi")):
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                query, capture_output=True, text=True, timeout=20, check=True
            ).stdout
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", said)
    return found and found.group()


def _has_gpu() -> bool:
    """Returns True if the PCI bus has a graphics device of NVIDIA."""
    cards = (path for path in PCI.glob("*/class") if path.read_text().startswith(DISPLAY))
    return any(path.with_name("vendor").read_text().strip() == NVIDIA for path in cards)
