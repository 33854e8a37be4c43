"""Ranks, started by torchrun, or one alone. DDP aside, every collective of the project is here."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastgpt.errors import OtherRankError, UserError

T = TypeVar("T")

PATIENCE = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many ranks this process is."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average(self, x: Tensor) -> Tensor:
        """Mean over ranks of `x` (any shape, floating), on its device, without waiting for it."""
        if self.size > 1:
            x = x / self.size
            dist.all_reduce(x)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks of `x` (any shape), in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def from_main(self, value: Any, group: Any = None) -> Any:
        """The main rank's `value`, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.sum(torch.zeros(())).item()

    def on_main(self, work: Callable[[], T], *, patient: bool = False) -> T:
        """What `work` gives on the main rank, on every rank; its `UserError` is raised on all.

        The others wait, without end if `patient`.
        """
        # the usual time-out is half an hour; the group is made while all ranks are here
        long = patient and self.size > 1
        group = dist.new_group(backend="gloo", timeout=PATIENCE) if long else None
        value, problem = None, None
        if self.is_main:
            try:
                value = work()
            except UserError as error:
                problem = error
        outcome = (value, None if problem is None else str(problem))
        value, message = self.from_main(outcome, group)
        if message is not None:
            raise problem or OtherRankError(message)
        return value


def start(device_type: str) -> World:
    """Joins torchrun's process group where there is one: gloo for CPU tensors, NCCL for CUDA's."""
    if "RANK" not in os.environ:
        return World()
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise UserError(
            f"RANK is set, but {', '.join(missing)} not: expected all that torchrun sets, or none"
        )
    world = World(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
    )
    if device_type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{os.environ['LOCAL_WORLD_SIZE']} processes were started on a machine with "
                f"{torch.cuda.device_count()} CUDA devices: pass torchrun --nproc_per_node="
                f"{torch.cuda.device_count()}"
            )
        torch.cuda.set_device(world.local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    return world


def stop() -> None:
    """Leaves the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


class StopSignal:
    """SIGTERM and Ctrl-C as a flag that all ranks see at the same step; a second one kills."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before = {s: signal.signal(s, self._on_signal) for s in self.SIGNALS}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.restore()

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, world: World) -> bool:
        """Whether any rank was told to stop; the hosts ask each other, no device is waited for."""
        return bool(world.sum(torch.tensor(int(self.received is not None))))
