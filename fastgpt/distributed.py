"""Ranks, the processes started by torchrun, and all collective operations except DDP's."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastgpt.errors import OtherRankError, UserError, counted

T = TypeVar("T")

PATIENCE = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process and the number of ranks."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average(self, x: Tensor) -> Tensor:
        """Returns the mean of `x` (any shape, floating) over ranks, without a host sync."""
        if self.size > 1:
            x = x / self.size
            dist.all_reduce(x)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sums `x` (any shape) over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Joins the ranks' `x` (n, ...), any dtype, along the first dimension in their order."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        # renamed in PyTorch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, x.contiguous())
        return out

    def from_main(self, value: Any, group: Any = None) -> Any:
        """Broadcasts the main rank's `value` to every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def barrier(self) -> None:
        """Waits until every rank has called this."""
        self.sum(torch.zeros(())).item()

    def on_main(self, work: Callable[[], T], *, patient: bool = False) -> T:
        """Calls `work` on the main rank; every rank returns its result or raises its `UserError`.

        The other ranks wait: up to the backend's timeout, or up to 30 days if `patient`.
        """
        # the default timeout is half an hour; the group is made while all ranks are here
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
    """Joins torchrun's process group, if any: gloo for CPU tensors, NCCL for CUDA tensors."""
    if "RANK" not in os.environ:
        return World()
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise UserError(
            f"RANK is set, but not {', '.join(missing)}: expected all that torchrun sets, or none"
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
                f"{counted(torch.cuda.device_count(), 'CUDA device')}: "
                f"pass torchrun --nproc_per_node={torch.cuda.device_count()}"
            )
        torch.cuda.set_device(world.local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    return world


def stop() -> None:
    """Leaves the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Stopped(Exception):  # noqa: N818
    """Raised by all ranks at the same place after a signal asked the run to stop."""


class StopSignal:
    """Handles SIGINT (Ctrl-C) and SIGTERM as requests to stop; a second one ends the process."""

    # both end the process, although a shell script ignores SIGINT in its `&` commands
    DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}  # noqa: RUF012

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self.say = say
        self._before = {number: signal.signal(number, self._on_signal) for number in self.DEFAULTS}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._set(self.DEFAULTS)
        with suppress(RuntimeError):  # the signal came in the middle of a write to the terminal
            again = "press Ctrl-C" if number == signal.SIGINT else "send it"
            self.say(
                f"{self.received.name}: stopping after this micro-step or evaluation batch, and"
                f" saving; {again} again to stop at once, without saving"
            )

    def ask(self) -> None:
        """Asks the run to stop, as a signal does, without a line about it."""
        self.received = self.received or signal.SIGTERM

    def restore(self) -> None:
        """Restores the signal handlers that were set before."""
        self._set(self._before)

    def _set(self, handlers: Mapping[signal.Signals, Any]) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def check(self, world: World, *, ranks_meet: bool) -> None:
        """Raises `Stopped` if any rank was asked to stop.

        Args:
            ranks_meet: True before a collective operation, where every rank must call this. At
                other places a rank that was asked to stop waits here for the next such call.
        """
        if (ranks_meet or self.received) and self.agreed(world):
            raise Stopped

    def agreed(self, world: World) -> bool:
        """Returns True if any rank was asked to stop, by a CPU collective without a device sync."""
        return bool(world.sum(torch.tensor(int(self.received is not None))))
