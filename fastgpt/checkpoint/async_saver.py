"""Checkpoints written by a thread, from a copy of weights and optimizer state in host memory.

Training waits only for the copy. Serialising, hashing and publishing take place beside the next
steps and evaluations.
"""

import copy
import ctypes
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import checkpoint, sharded
from fastgpt.errors import OtherRankError, UserError, reason
from fastgpt.files import sha256_of
from fastgpt.parallel.distributed import PATIENCE, World
from fastgpt.parallel.fsdp import local_shard

T = TypeVar("T")


class Snapshot:
    """Copy of tensors in host memory, which is pinned for tensors on CUDA and reused.

    It takes as many bytes as the tensors; PyTorch rounds each pinned buffer up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def reserve(self, tree: Any) -> None:
        """Allocates the memory for copies of `tree`, and touches each page of it.

        PyTorch would fill it with OpenMP. In a thread of its own that starts a second team of
        workers; the first then sleeps at the end of each operation instead of spinning, as there
        are more workers than cores, and small steps take twice as long ever after.

        Raises:
            UserError: there is not enough memory.
        """
        tensors = _tensors(tree)
        try:
            for number, tensor in enumerate(tensors):
                buffer = self._buffer(number, tensor)
                own = local_shard(buffer)
                ctypes.memset(own.data_ptr(), 0, own.nbytes)
        except RuntimeError as error:
            size = sum(local_shard(tensor).nbytes for tensor in tensors) / 2**30
            raise UserError(
                f"no host memory for a copy of weights and optimizer state ({size:.1f} GiB), from"
                f" which checkpoints are written: {reason(error)}"
            ) from error

    @torch.no_grad()
    def take(self, tree: T) -> T:
        """Returns `tree` with its tensors copied to host memory; the next call overwrites them."""
        copies, waits = {}, False
        for number, tensor in enumerate(_tensors(tree)):
            buffer = copies[id(tensor)] = self._buffer(number, tensor)
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
            waits |= tensor.is_cuda
        if waits:
            torch.cuda.current_stream().synchronize()
        return copy.deepcopy(tree, copies)  # pyright: ignore[reportArgumentType]

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        """Returns the buffer of the tensor `number`, a new one where shape or dtype changed."""
        key = (number, like.shape, like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
        return self._buffers[key]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Publisher:
    """Runs jobs in a thread, one after the other; after an error it runs no more of them."""

    def __init__(self) -> None:
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # a new thread begins on GPU 0, and would use memory there
        begin = None if gpu is None else partial(torch.cuda.set_device, gpu)
        self._thread = ThreadPoolExecutor(1, "publisher", begin)
        self._jobs: list[Future[None]] = []
        self.failed = False

    def start(self, job: Callable[[], object]) -> None:
        """Queues `job`; its error is raised by the next `wait`."""
        self._jobs.append(self._thread.submit(self._run, job))

    def _run(self, job: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            job()
        except BaseException:
            self.failed = True
            raise

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


class Saver(Publisher):
    """Writes the checkpoints of a run, in a thread.

    Args:
        folder: folder of the checkpoints.
        world: the ranks, if they share the weights: each has a saver, and they write together.
        fixed: what `checkpoint.save` is given each time, such as `config_json` and `keep`.
    """

    def __init__(self, folder: Path, world: World | None = None, **fixed: Any) -> None:
        super().__init__()
        self.folder, self._write = folder, partial(checkpoint.save, folder, **fixed)
        if world is not None:
            # of its own, because the thread's collectives run beside those of training
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
            self._write = partial(_save_shards, folder, world=world, group=group, **fixed)
        self._snapshot = Snapshot()
        self._started: int | None = None
        self.reserved = False

    def reserve(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Allocates the host memory in the thread, so that the first save need not."""
        self.reserved = True
        self.start(lambda: self._snapshot.reserve([weights, state]))

    def save(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Copies weights and state, and starts to write them as the checkpoint of `step`.

        Raises:
            UserError: an earlier checkpoint could not be written.
        """
        self.wait()  # it reads the copies that are overwritten here
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


def _save_shards(
    folder: Path,
    step: int,
    *,
    weights: dict[str, Tensor],
    state: dict[str, Any],
    world: World,
    group: dist.ProcessGroup,
    **fixed: Any,
) -> None:
    """Writes a checkpoint as `checkpoint.save` does, each rank its parts; a collective operation.

    Raises:
        UserError: the disk is full or cannot be written, on any rank.
    """
    writer = checkpoint.CheckpointWriter(folder, step)
    parts = {sharded.MODEL + name: x for name, x in weights.items()}
    plain = {key: sharded.flatten_state(x, key, parts) for key, x in state.items()}

    def begin() -> None:
        with writer.errors():
            writer.begin()

    def publish() -> None:
        with writer.errors():
            path = writer.path / sharded.STATE
            path.write_text(json.dumps(plain, indent=1))
            hashes[path.name] = sha256_of(path)
            writer.publish(hashes, **fixed)

    world.on_rank0(begin, group=group)
    try:
        with writer.errors() if world.is_main else nullcontext():
            sharded.write(writer.path, parts, group)
            mine = sorted(writer.path.glob(sharded.SHARDS))[world.rank :: world.size]
            found = world.all_gather_object({path.name: sha256_of(path) for path in mine}, group)
            hashes = {name: value for some in found for name, value in some.items()}
    except OSError as error:
        raise OtherRankError(str(error)) from error
    world.on_rank0(publish, group=group)
