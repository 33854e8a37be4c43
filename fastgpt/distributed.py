"""Ranks: processes started by torchrun, or one alone. All collectives but DDP's are here."""

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

from fastgpt.errors import OtherRankError, UserError

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
        """Gives every rank the main rank's `value`."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def barrier(self) -> None:
        """Waits until every rank has called this."""
        self.sum(torch.zeros(())).item()

    def on_main(self, work: Callable[[], T], *, patient: bool = False) -> T:
        """Calls `work` on the main rank, and gives its result to or raises its `UserError` on all.

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
    """Joins torchrun's process group, if any: gloo for CPU tensors, NCCL for CUDA tensors."""
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


class Stopped(Exception):  # noqa: N818
    """A signal asked the run to stop: raised by all ranks at the same place."""


class StopSignal:
    """Takes SIGINT (Ctrl-C) or SIGTERM as a request to stop; a second one ends the process.

    Args:
        say: prints a line; may be replaced.
    """

    # both end the process, though a shell has SIGINT ignored by what its script runs with `&`
    DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}  # noqa: RUF012

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self.say = say
        self._before = {number: signal.signal(number, self._on_signal) for number in self.DEFAULTS}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._set(self.DEFAULTS)
        with suppress(RuntimeError):  # the signal came in the middle of a write to the terminal
            self.say(
                f"{self.received.name}: stopping after this micro-step or evaluation batch, and"
                " saving; again to stop at once"
            )

    def restore(self) -> None:
        """Gives the signals back to the handlers that they had before."""
        self._set(self._before)

    def _set(self, handlers: Mapping[signal.Signals, Any]) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def check(self, world: World, *, ranks_meet: bool) -> None:
        """Raises `Stopped` if any rank was asked to stop.

        Args:
            world: the ranks.
            ranks_meet: what comes next needs every rank, so all of them must call this before. At
                other places a rank that was asked to stop goes to the next such meeting at once.
        """
        if (ranks_meet or self.received) and self.agreed(world):
            raise Stopped

    def agreed(self, world: World) -> bool:
        """True if any rank was asked to stop; hosts ask each other, no device is waited for."""
        return bool(world.sum(torch.tensor(int(self.received is not None))))
