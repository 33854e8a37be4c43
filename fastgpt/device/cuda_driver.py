"""Why torch sees no CUDA device on a machine with an NVIDIA driver."""

import os
import shutil
import subprocess
from pathlib import Path

import torch

LOADED = Path("/proc/driver/nvidia/version")


def why_no_cuda() -> str | None:
    """Explains, in PyTorch's words, why torch sees no CUDA device, and what to install.

    Returns:
        str | None: None if no NVIDIA driver runs, or CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or not _has_driver():
        return None
    here = f"this machine has an NVIDIA GPU, but torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{here} is built without CUDA: install a CUDA build of torch (pytorch.org)"
    try:
        torch.cuda.init()
        said = "see nvidia-smi; a container must be given its GPUs"
    except (RuntimeError, AssertionError) as error:  # an old driver, or no GPU in the container
        said = str(error).split("\n")[0].strip().rstrip(".")
    return f"{here} is built for CUDA {torch.version.cuda} and cannot use it: {said}"


def _has_driver() -> bool:
    """Returns True if NVIDIA's driver runs; Windows and WSL have only nvidia-smi to tell."""
    command = shutil.which("nvidia-smi")
    if LOADED.exists() or command is None:
        return LOADED.exists()
    try:
        return subprocess.run([command, "-L"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
