"""Checkpoints written by a thread, from a copy of weights and optimizer state in host memory.

Training waits only for the copy. Serialising, hashing and publishing take place beside the next
steps and evaluations.
"""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import checkpoint
from fastgpt.errors import UserError, reason

T = TypeVar("T")


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
        fixed: what `checkpoint.save` is given each time, such as `config_json` and `keep`.
    """

    def __init__(self, folder: Path, **fixed: Any) -> None:
        self.folder, self._write = folder, partial(checkpoint.save, folder, **fixed)
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
        return step == self._started or checkpoint.step_path(self.folder, step).exists()

    def mark_best(self, step: int) -> None:
        """Starts to copy the checkpoint of `step` to `best`, once it is written."""
        path = checkpoint.step_path(self.folder, step)
        self.start(lambda: checkpoint.mark_best(path))

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
