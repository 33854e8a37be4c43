"""Ranks, the processes started by torchrun, and their collective operations."""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastgpt.device.device import kind_of
from fastgpt.errors import OtherRankError, UserError, counted
from fastgpt.faults.failure import ARRIVAL_S, peer_monitor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process and the number of ranks."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    """Number of ranks on this machine."""
    model_parallel_size: int = 1
    """Number of neighbouring ranks that read the same data and compute it together."""

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups: ranks of one read the same data."""
        return self.size // self.model_parallel_size

    @property
    def dp_rank(self) -> int:
        """Index of this rank's data-parallel group."""
        return self.rank // self.model_parallel_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

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

    def broadcast_object(self, value: Any, group: Any = None) -> Any:
        """Broadcasts the main rank's `value` to every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the ranks' values, any but tensors, in their order."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Waits until every rank has called this."""
        self.sum(torch.zeros(())).item()

    def long_timeout_group(self) -> Any:
        """Makes a group of all ranks that waits up to 30 days; a collective operation."""
        return dist.new_group(backend="gloo", timeout=timedelta(days=30)) if self.size > 1 else None

    def on_rank0(self, work: Callable[[], T], group: Any = None) -> T:
        """Calls `work` on the main rank; every rank returns its result.

        Its `UserError` or `OSError` is raised there, and an `OtherRankError` on the other ranks.
        These wait up to the timeout of `group`, by default half an hour.
        """
        value, problem = None, None
        if self.is_main:
            try:
                value = work()
            except (UserError, OSError) as error:
                problem = error
        outcome = (value, None if problem is None else str(problem))
        value, message = self.broadcast_object(outcome, group)
        if message is not None:
            raise problem or OtherRankError(message)
        return value


def start(device_type: str) -> World:
    """Joins torchrun's process group, if any: gloo for CPU tensors, the device's for its own.

    Raises:
        UserError: there are fewer devices than ranks, or a rank does not arrive.
    """
    if "RANK" not in os.environ:
        return World()
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise UserError(
            f"RANK is set, but not {', '.join(missing)}: expected all that torchrun sets, or none"
        )
    world = World(*(int(os.environ[name]) for name in needed[:4]))
    peer_monitor.start()
    _take_device(device_type, world)
    if not dist.is_initialized():
        backend, store = kind_of(device_type).backend, _rendezvous_store(world)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
        if world.size > 1:
            peer_monitor.connect(world.rank, world.size, world.broadcast_object)
    return world


def _take_device(device_type: str, world: World) -> None:
    """Makes this rank use the device of its local rank; CPUs are shared."""
    kind = kind_of(device_type)
    if kind.backend is None and world.size > 1:
        raise UserError(f"{world.size} processes were started: expected one on {kind.name}")
    if device_type == "cpu" or kind.backend is None:
        return
    devices = torch.get_device_module(device_type)
    if world.local_rank >= devices.device_count():
        raise UserError(
            f"{world.local_size} processes were started on a machine with "
            f"{counted(devices.device_count(), f'{kind.name} device')}: "
            f"pass torchrun --nproc_per_node={devices.device_count()}"
        )
    devices.set_device(world.local_rank)


def _rendezvous_store(world: World) -> Any:
    """Waits until all ranks have arrived, and returns the store that they share.

    After a restart torchrun's store may be the same as before, with the addresses of processes that
    have ended. So the main rank gives each process, which it knows by a new name, a prefix for the
    keys of this start.

    Raises:
        UserError: one has not arrived in time. PyTorch itself waits for half an hour.
    """
    seconds = float(os.environ.get("FASTGPT_ARRIVAL_S") or ARRIVAL_S)
    longer = "look for the reason there, or set FASTGPT_ARRIVAL_S to more seconds"
    try:
        store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except dist.DistError as error:
        raise UserError(f"the ranks did not meet within {seconds:g} s: {longer}") from error
    token, late = secrets.token_hex(8), 0
    store.set(f"name/{world.rank}", token)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if world.is_main:
            for name in (f"name/{i}" for i in range(world.size)):
                if store.check([name]):
                    store.set(f"start/{store.get(name).decode()}", token)
        if store.check([f"start/{token}"]):
            start = PrefixStore(store.get(f"start/{token}").decode(), store)
            start.set(f"arrived/{world.rank}", "")
            arrived = [start.check([f"arrived/{i}"]) for i in range(world.size)]
            if all(arrived):
                return start
            late = arrived.index(False)
        time.sleep(0.02)  # the store's own wait prints warnings
    raise UserError(f"rank {late} did not arrive within {seconds:g} s: {longer}")
