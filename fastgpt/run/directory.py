"""Run directories: finding, creating, opening, locking and resuming them."""

import itertools
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from fastgpt.checkpoint import checkpoint
from fastgpt.commands import resume_command
from fastgpt.config.config import Config, to_json
from fastgpt.errors import UserError, writing
from fastgpt.files import write_atomically

ROOT = Path("runs")
WRITTEN = re.compile(
    r"\.lock|checkpoints|wandb|(config|manifest)\.json|metrics\.jsonl|.*\.(txt|png|tracked)"
)
"""Names of files and folders in a run that are known before it writes them."""


def find_run(resume: str, run_dir: Path | None, recipe: str) -> tuple[Path, Path] | None:
    """Finds the run to resume, and the path to load it from: a checkpoint's, or the run's.

    Returns None if `auto` finds no run, so that a new one starts.

    Args:
        resume: `auto`, or the path of a run or of a checkpoint.
        run_dir: directory where `auto` looks; None: the newest run of `recipe`.

    Raises:
        UserError: the path given is neither a run nor a checkpoint.
    """
    if resume == "auto":
        runs = filter(is_run, [run_dir] if run_dir else ROOT.glob(f"{recipe}-2*"))
        found = max(runs, key=_last_start, default=None)
        return None if found is None else (found, found)
    path = Path(resume)
    if checkpoint.is_checkpoint(path):
        return path.absolute().parent.parent, path
    if is_run(path):
        return path, path
    what = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
    raise UserError(f"--resume {resume} {what}: expected auto, or the path of a run or checkpoint")


def _last_start(run: Path) -> int:
    """Returns when a run began or was resumed: its name has the time of a clock that may jump."""
    return max(path.stat().st_mtime_ns for path in run.glob("*.json"))


def without_auto(config: Config) -> Config:
    """Returns settings that name the run which `resume="auto"` finds, or none to begin anew."""
    if config.resume != "auto":
        return config
    run, resume = find_run("auto", config.run_dir, config.recipe) or (config.run_dir, None)
    return replace(config, run_dir=run, resume=resume and str(resume))


def has_no_checkpoint(path: Path) -> bool:
    """Returns True if `path` is a run without a checkpoint, which starts from its first step."""
    return is_run(path) and not checkpoint.steps_on_disk(path / "checkpoints")


def resumes(resume: str | None) -> bool:
    """Returns True if `resume` stands for a checkpoint; False for a run that has none yet."""
    return resume is not None and not has_no_checkpoint(Path(resume))


def resumed_name(resume: str | None) -> str | None:
    """Returns the name of the newest checkpoint that `resume` stands for; None: it has none."""
    if resume is None:
        return None
    path = Path(resume)
    found = (
        [path] if checkpoint.is_checkpoint(path) else checkpoint.steps_on_disk(path / "checkpoints")
    )
    return found[-1].name if found else None


def is_run(path: Path) -> bool:
    """Returns True if `path` is a run's directory, even of a run without a checkpoint."""
    return (path / "config.json").exists() and (path / "checkpoints").is_dir()


def new_run_dir(recipe: str) -> Path:
    """Returns a new path for a run of `recipe`, where nothing exists yet."""
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    paths = (ROOT / (stem if i == 1 else f"{stem}-{i}") for i in itertools.count(1))
    return next(path for path in paths if not path.exists())


def open_run_dir(path: Path, config: Config, step: int, ranks: int = 1) -> str | None:
    """Creates the directory of a new run, or reopens that of a run resumed at `step`.

    What the run wrote after `step` is kept in `abandoned_N`, which can be resumed like a run.
    Returns a warning if the run has to start again from its first step.

    Raises:
        UserError: the directory holds another run, or cannot be written.
    """
    resume, known = config.resume, (path / "config.json").exists()
    resumed = resume is not None and Path(resume).resolve().is_relative_to(path.resolve())
    if known and not resumed:
        raise UserError(
            f"{path} holds a run already: pass another --run-dir; to resume that run:"
            f" {resume_command(path, ranks)}"
        )
    restarts = has_no_checkpoint(path)
    with writing(path):
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        note = _quarantine_logs(path) if restarts else ""
        _quarantine_newer(path, step)
        if not known:  # else with the first step that is taken with these settings
            write_config(path, config)
    return f"{path} has no checkpoint yet: starting from its first step{note}" if restarts else None


def write_config(path: Path, config: Config) -> None:
    """Writes the settings of a run."""
    with writing(path):
        write_atomically(path / "config.json", to_json(config).encode())


def _abandoned(path: Path) -> Path:
    """Makes the next folder `abandoned_N` of a run."""
    aside = next(x for i in itertools.count(1) if not (x := path / f"abandoned_{i}").exists())
    aside.mkdir()
    return aside


def _quarantine_newer(path: Path, step: int) -> None:
    """Moves checkpoints later than `step` to a new `abandoned_N`, with copies of the logs."""
    if later := checkpoint.later_than(path / "checkpoints", step):
        aside = _abandoned(path)
        (aside / "checkpoints").mkdir()
        for name in ("config.json", "manifest.json", "metrics.jsonl"):
            with suppress(FileNotFoundError):
                shutil.copyfile(path / name, aside / name)
        for old in later:
            old.rename(aside / "checkpoints" / old.name)


def _quarantine_logs(path: Path) -> str:
    """Moves the logs of a run to `abandoned_N`, and returns a clause that says so."""
    logs = ("metrics.jsonl", "samples.txt", "loss.png", "events.out.tfevents.*", "*.tracked")
    files = [file for pattern in logs for file in path.glob(pattern)]
    if not files:
        return ""
    aside = _abandoned(path)
    for file in files:
        file.rename(aside / file.name)
    return f"; its earlier logs are kept in {aside}"


def resume_hint(path: Path, ranks: int) -> str:
    """Returns a clause for error messages: a run's newest checkpoint and the command to resume."""
    if not is_run(path):
        return "nothing is left there to resume"
    saved = checkpoint.steps_on_disk(path / "checkpoints")
    found = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
    return f"{found}; to resume: {resume_command(path, ranks)}"


class RunLock:
    """Lock on a run's directory, held by the one process that may write there.

    The operating system releases it when the process ends.

    Args:
        instead: what the user may do if another process holds it, besides waiting.

    Raises:
        UserError: another process holds it, the directory cannot be written, or what the run writes
            is a symbolic link, which may lead out of the directory.
    """

    def __init__(self, path: Path, instead: str = "stop it") -> None:
        self.path, self._lock = path, FileLock(path / ".lock", thread_local=False)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            for file in path.iterdir():
                if file.is_symlink() and WRITTEN.fullmatch(file.name):
                    raise UserError(f"{file} is a symbolic link: expected that only {path} is one")
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                raise UserError(
                    f"{path} is in use: another process is training in this folder: wait until it"
                    f" ends, or {instead}"
                ) from None
            # of its own: it tells where the directory is even if that is moved
            self._file = (path / ".lock").open()

    @property
    def place(self) -> Path:
        """Path of the directory, which Linux knows even after that was moved."""
        with suppress(OSError):
            return Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}")).parent
        return self.path

    def check(self) -> None:
        """Raises `UserError` if directory or lock are no longer those that were opened."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self._lock.lock_file), os.fstat(self._file.fileno())):
                return
        lost = "has lost its .lock, so that another process may be training there"
        what = lost if self.path.exists() else "was moved or removed"
        raise UserError(f"{self.path} {what}: this run ends")

    def release(self) -> None:
        """Lets other processes train in the directory."""
        if self._lock.is_locked:
            self._file.close()
            self._lock.release()
