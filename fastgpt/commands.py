"""Command lines that an error message or the end of a run gives the user to type."""

import importlib.metadata
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).absolute().parents[1]


def resume_command(run_dir: Path, ranks: int) -> str:
    """Returns the command line that resumes a run, which works from any directory."""
    program = _console_command("fastgpt-train") or [sys.executable, str(CHECKOUT / "train.py")]
    if ranks > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        installed_command = program[0] != sys.executable
        program = torchrun + (["--no-python", *program] if installed_command else program[1:])
    return shlex.join([*program, "--resume", str(run_dir.absolute())])


def sample_command(run_dir: Path) -> str:
    """Returns the command line that samples from a run, which works from any directory."""
    module = [sys.executable, "-m", "fastgpt.sample"]
    program = _console_command("fastgpt-sample") or module
    line = shlex.join([*program, str(run_dir.absolute())])
    # only an installed package can be imported from any directory
    anywhere = program is not module or installed("fastgpt-triton")
    return line if anywhere else f"cd {shlex.quote(str(CHECKOUT))} && {line}"


def _console_command(name: str) -> list[str] | None:
    """Returns the absolute path of a console command if one was typed or there is no checkout."""
    typed = Path(sys.argv[0])
    if typed.name.startswith("fastgpt-"):
        return [str(typed.absolute().with_name(name))]
    if not (CHECKOUT / "train.py").exists():
        return [str(Path(sys.executable).with_name(name))]
    return None


def installed(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
