"""Checkpoints: written atomically, verified when loaded, and resumed bit for bit.

A checkpoint is a folder `step_00000500`:
    model.safetensors   the weights under GPT-2's names, without the vocabulary's padding
    state.pt            optimizer and loader state (read with weights_only=True)
    config.json         the run's settings
    tokenizer.json      so that a checkpoint can always decode its own output
    huggingface.json    files of a converted model that fastgpt does not interpret; else missing
    checkpoint.json     format version, step, and the sha256 of each file above; written last
It is written under a temporary name, fsynced and renamed, so that a folder named `step_*` is always
complete. A thread does so, from a copy in host memory: training waits only for the copy.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import tensors
from fastgpt.commands import resume_command
from fastgpt.errors import UserError, is_disk_full, reason, shown, writing
from fastgpt.files import parse_json, sha256_of, sync_directory
from fastgpt.parallel.distributed import World

T = TypeVar("T")
ALONE = World()
FORMAT_VERSION = 2
RECORD = "checkpoint.json"
STEP = re.compile(r"step_\d{8,}")
WEIGHT_FILES = ("model.safetensors", "state.pt")
SIDE_FILES = ("config.json", "tokenizer.json", "huggingface.json")
"""A model that was converted may lack the second, and it alone has the third."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read back and verified."""

    path: Path
    step: int
    weights: tensors.Weights
    """They are read from the file when they are asked for."""
    state: dict[str, Any]


def save(
    folder: Path, step: int, *, weights: Mapping[str, Tensor], state: dict[str, Any],
    config_json: str, save_tokenizer: Callable[[Path], None] | None, keep: int,
    huggingface_json: str | None = None,
) -> Path:  # fmt: skip
    """Writes the checkpoint `folder/step_N` and removes old ones.

    Args:
        keep: number of newest checkpoints that are not removed.
        huggingface_json: of a model that was converted, its `OpenedModel.hf_files`.

    Raises:
        UserError: the disk is full or cannot be written; no partial checkpoint is left.
    """
    path = folder / f".writing_{step:08d}"
    try:
        for pattern in (".writing_*", ".removing_*", ".best"):  # left by a process that was killed
            for left_over in folder.glob(pattern):
                shutil.rmtree(left_over)
        path.mkdir(parents=True)
        tensors.write(path / WEIGHT_FILES[0], weights)
        with (path / WEIGHT_FILES[1]).open("wb") as file:  # with a path, errors lack the reason
            torch.save(state, file)
        (path / "config.json").write_text(config_json)
        if huggingface_json is not None:
            (path / "huggingface.json").write_text(huggingface_json)
        if save_tokenizer is not None:
            save_tokenizer(path / "tokenizer.json")
        names = [name for name in (*WEIGHT_FILES, *SIDE_FILES) if (path / name).exists()]
        hashes = {name: sha256_of(path / name) for name in names}
        record = {"format_version": FORMAT_VERSION, "step": step, "sha256": hashes}
        (path / RECORD).write_text(json.dumps(record, indent=1))
        for written in path.iterdir():
            with written.open("rb+") as file:
                os.fsync(file.fileno())
        sync_directory(path)
        final = step_path(folder, step)
        _remove(final)
        path.rename(final)
        sync_directory(folder)
        for old in steps_on_disk(folder)[:-keep]:
            _remove(old)
        return final
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeErrors
        shutil.rmtree(path, ignore_errors=True)
        what = f"the checkpoint of step {step}"
        if is_disk_full(error):
            said = f"no space left on the disk of {folder}: {what} was not saved"
            raise UserError(said) from error
        raise UserError(f"cannot save {what} in {folder}: {reason(error)}") from error


def _remove(path: Path) -> None:
    """Removes a checkpoint, renamed first: an interruption leaves no partial one of its name."""
    if path.exists():
        hidden = path.with_name(f".removing_{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)  # left by an interrupted removal
        path.rename(hidden)
        shutil.rmtree(hidden)


def is_checkpoint(path: Path) -> bool:
    """Returns True if `path` is a checkpoint, even a damaged one."""
    return (path / RECORD).exists() or (path.is_dir() and bool(STEP.fullmatch(path.name)))


def step_path(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step`, which need not exist."""
    return folder / f"step_{step:08d}"


def mark_best(checkpoint: Path) -> None:
    """Copies `checkpoint` to the folder `best` beside it, with hard links if the disk has them."""
    best, temporary = checkpoint.parent / "best", checkpoint.parent / ".best"
    with writing(best):
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(checkpoint, temporary, copy_function=_link)
        _remove(best)
        temporary.rename(best)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def saved_steps(folder: Path) -> set[float]:
    """Returns the steps of the checkpoints in `folder`, including `best`."""
    return {_step(path) for path in (*steps_on_disk(folder), folder / "best")}


def steps_on_disk(folder: Path) -> list[Path]:
    """Lists the paths of the checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step_*") if STEP.fullmatch(path.name))


def _step(path: Path) -> float:
    """Returns the step in a checkpoint's name or record; infinity if the record is unreadable."""
    if STEP.fullmatch(path.name):
        return int(path.name.removeprefix("step_"))
    try:
        return read_record(path)["step"]
    except UserError:
        return float("inf")


# --- saving beside training -----------------------------------------------------------------------


class Snapshot:
    """Copy of tensors in host memory, which is pinned for tensors on CUDA and reused.

    It takes as many bytes as the tensors; PyTorch rounds each pinned buffer up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    @torch.no_grad()
    def take(self, tree: T) -> T:
        """Returns `tree` with its tensors copied to host memory; the next call overwrites them."""
        copies: dict[int, Tensor] = {}
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        for number, x in enumerate(tensors):
            key = (number, x.shape, x.dtype)
            try:
                if key not in self._buffers:
                    self._buffers[key] = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
            except RuntimeError as error:
                raise UserError(
                    "no host memory for a copy of weights and optimizer state, from which"
                    f" checkpoints are written: {reason(error)}"
                ) from error
            copies[id(x)] = self._buffers[key].copy_(x, non_blocking=x.is_cuda)
        if any(x.is_cuda for x in tensors):
            torch.cuda.current_stream().synchronize()
        return copy.deepcopy(tree, copies)  # pyright: ignore[reportArgumentType]


class Saver:
    """Writes the checkpoints of a run in a thread, one after the other.

    Args:
        folder: folder of the checkpoints.
        fixed: what `save` is given each time, such as `config_json` and `keep`.
    """

    def __init__(self, folder: Path, **fixed: Any) -> None:
        self.folder, self._write = folder, partial(save, folder, **fixed)
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # a new thread begins on GPU 0, and would use memory there
        begin = None if gpu is None else partial(torch.cuda.set_device, gpu)
        self._thread = ThreadPoolExecutor(1, "publisher", begin)
        self._jobs: list[Future[object]] = []
        self._snapshot = Snapshot()
        self._started: int | None = None

    def save(
        self, step: int, weights: dict[str, Tensor], state: dict[str, Any], *, copied: bool = False
    ) -> None:
        """Copies weights and state, and starts to write them as the checkpoint of `step`.

        Those that are `copied` already are used as they are. Raises `UserError` if an earlier
        checkpoint could not be written, or memory is short.
        """
        self.wait()  # it reads the copies that are overwritten here
        if not copied:
            weights, state = self._snapshot.take([weights, state])
        self._started = step
        self.start(partial(self._write, step, weights=weights, state=state))

    def has(self, step: int) -> bool:
        """Returns True if the checkpoint of `step` exists or is being written."""
        return step == self._started or step_path(self.folder, step).exists()

    def mark_best(self, step: int) -> None:
        """Starts to copy the checkpoint of `step` to `best`, once it is written."""
        self.start(partial(mark_best, step_path(self.folder, step)))

    def start(self, job: Callable[[], object]) -> None:
        """Queues `job`; its error is raised by the next `wait`."""
        self._jobs.append(self._thread.submit(job))

    @property
    def failed(self) -> bool:
        """True if a job that was not waited for has failed."""
        return any(job.done() and job.exception() for job in self._jobs)

    def wait(self) -> None:
        """Waits for all jobs, and raises the error of the one that failed, the first time."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def close(self) -> None:
        """Waits as `wait` does, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


# --- loading --------------------------------------------------------------------------------------


def load(path: Path, *, state: bool = True, world: World = ALONE) -> Checkpoint:
    """Loads a checkpoint and verifies its checksums.

    Args:
        state: also loads the state of optimizer and data; else that is empty.
        world: the ranks that load it together; the ranks of a machine share the checksums' work.

    Raises:
        UserError: a file is missing, altered or of an unknown format, or the ranks' names differ.
    """
    record = _on_all_ranks(path, world, lambda: _verified(path, world))

    def read() -> Checkpoint:
        weights = tensors.read(path / WEIGHT_FILES[0])
        mapped = world.size > 1
        found = tensors.unpickle(path / WEIGHT_FILES[1], mmap=mapped) if state else {}
        return Checkpoint(path=path, step=record["step"], weights=weights, state=found)

    return _on_all_ranks(path, world, read)


def _on_all_ranks(path: Path, world: World, work: Callable[[], T]) -> T:
    """Returns the result of `work`; an error of one rank is raised on all, which wait for it."""
    result, problem = None, None
    try:
        result = work()
    except (UserError, OSError) as error:
        problem = str(error)
    found = world.all_gather_object((path.name, problem))
    if others := {name for name, _ in found} - {path.name}:
        raise UserError(f"the ranks see different checkpoints: {path.name}, {min(others)}")
    for _, problem in found:
        if problem is not None:
            raise UserError(problem)
    return cast(T, result)


def _verified(path: Path, world: World) -> dict[str, Any]:
    """Returns the record of a checkpoint; this rank verifies its share of the files."""
    record = read_record(path)
    local = list(record["sha256"])[world.local_rank :: world.local_size]
    for name, expected in record["sha256"].items():
        if not (path / name).is_file():
            raise UserError(f"checkpoint {path} is incomplete: {name} is missing")
        if name in local and (found := sha256_of(path / name)) != expected:
            raise UserError(
                f"checkpoint {path} is damaged: {name} has sha256 {found[:16]}..., "
                f"expected {str(expected)[:16]}..."
            )
    return record


def read_record(path: Path) -> dict[str, Any]:
    """Reads the `checkpoint.json` of a checkpoint and checks its format version."""
    try:
        record = parse_json((path / RECORD).read_text())
        version = record["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"checkpoint {path} has format version {shown(version)}: expected {FORMAT_VERSION}"
            )
        names = record["sha256"].keys()
        if "state.json" in names:
            raise UserError(
                f"checkpoint {path} has files of each rank, as version 0.2 wrote them: resume it"
                " with that version and --parallel.kind ddp"
            )
        least = {"config.json", *WEIGHT_FILES}
        of_folder = all(Path(name).name == name for name in names)
        step_known = type(record["step"]) is int and record["step"] >= 0
        if not (step_known and of_folder and least <= names):
            raise ValueError("it is damaged")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a checkpoint: cannot read its checkpoint.json") from error
    if STEP.fullmatch(path.name) and path != (expected := step_path(path.parent, record["step"])):
        raise UserError(
            f"checkpoint {path} is of step {record['step']}: expected the name {expected}"
        )
    return record


def find(resume: str, *, state: bool = True, world: World = ALONE) -> tuple[Checkpoint, list[str]]:
    """Loads a checkpoint, and returns it with the errors of newer ones that were skipped.

    `resume` is the path of a checkpoint, or of a run, whose newest valid checkpoint is loaded;
    `UserError` if there is none. `load` explains the other arguments.
    """
    path, complaints = Path(resume), []
    if is_checkpoint(path):
        try:
            return load(path, state=state, world=world), []
        except UserError as error:
            raise UserError(f"{error}; {previous_valid(path, state, world)}") from error
    for candidate in reversed(steps_on_disk(path / "checkpoints")):
        try:
            return load(candidate, state=state, world=world), complaints
        except UserError as error:
            complaints.append(str(error))
    if complaints:
        raise UserError("; ".join([f"{path} has no valid checkpoint", *complaints]))
    what = "is not a run" if path.exists() else "does not exist"
    if (path / "checkpoints").is_dir():
        what = "has no checkpoint yet"
    raise UserError(f"RUN {resume!r} {what}: expected the path of a run or checkpoint")


def previous_valid(path: Path, state: bool, world: World) -> str:
    """Names the newest valid checkpoint before `path`, with `state` also how to resume there."""
    for earlier in reversed([x for x in steps_on_disk(path.parent) if _step(x) < _step(path)]):
        with suppress(UserError):
            load(earlier, state=state, world=world)
            resume = f"; to resume there: {resume_command(earlier, world.size)}" if state else ""
            return f"the valid one before it is {earlier}{resume}"
    return "none before it is valid"


def later_than(folder: Path, step: int) -> list[Path]:
    """Lists the paths of the checkpoints in `folder` that are later than `step`, with `best`."""
    paths = (*steps_on_disk(folder), folder / "best")
    return [path for path in paths if path.exists() and _step(path) > step]
