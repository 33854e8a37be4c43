"""Command lines that a help, an error message or the end of a run gives the user to type."""

import importlib.metadata
import shlex
import shutil
import sys
from pathlib import Path

CHECKOUT = Path(__file__).absolute().parents[1]


def command(uninstalled: str) -> str:
    """Returns the installed command that was typed (`fastgpt-train`), else `uninstalled`."""
    typed = Path(sys.argv[0])
    if not typed.name.startswith("fastgpt-"):
        return uninstalled
    return typed.name if shutil.which(typed.name) else shlex.quote(str(typed))


def resume_command(run_dir: Path, ranks: int) -> str:
    """Returns the command line that resumes a run, which works from any directory."""
    script = CHECKOUT / "train.py"
    program = [str(script)] if script.exists() else ["-m", "fastgpt.cli"]
    if ranks > 1:
        program = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *program]
    return shlex.join([sys.executable, *program, "--resume", str(run_dir.absolute())])


def sample_command(run_dir: Path) -> str:
    """Returns the command line that samples from a run, which works from any directory."""
    line = shlex.join([sys.executable, "-m", "fastgpt.sample", str(run_dir.absolute())])
    # only an installed package can be imported from any directory
    return line if installed("fastgpt-triton") else f"cd {shlex.quote(str(CHECKOUT))} && {line}"


def install_command(extra: str, *packages: str) -> str:
    """Returns the command line that adds an extra; pip would make a clone's install a copy."""
    in_clone = (CHECKOUT / "Makefile").exists()
    return f"make setup EXTRAS={extra}" if in_clone else f"pip install {' '.join(packages)}"


def installed(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
