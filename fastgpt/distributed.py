"""Ranks, the processes started by torchrun, and all collective operations except DDP's."""

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastgpt.device import kind_of
from fastgpt.errors import OtherRankError, UserError, counted, tell_torchrun
from fastgpt.lifeline import FAILED, GRACE_S, STALLED, Lifeline, follow_launcher

T = TypeVar("T")

PATIENCE = timedelta(days=30)
NCCL_TIMEOUT = timedelta(minutes=10)
ARRIVAL_S = 25.0
"""Seconds that ranks wait for each other when they start; $FASTGPT_ARRIVAL_S replaces it."""
REQUEUE = 75
"""Exit status of a run that SIGUSR1 stopped: this job should be queued again (EX_TEMPFAIL)."""
_lifeline: Lifeline | None = None
_stopping: threading.Event | None = None
"""Set when a signal has asked a rank of torchrun's to stop."""


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process and the number of ranks."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    """Number of ranks on this machine."""
    peers: int = 1
    """Number of neighbouring ranks that read the same data and compute it together."""

    @property
    def readers(self) -> int:
        """Number of groups of ranks that read data of their own."""
        return self.size // self.peers

    @property
    def reader(self) -> int:
        """Number of this rank's group."""
        return self.rank // self.peers

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

    @staticmethod
    def sum_within(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sums `x` (any shape) over the ranks of a group, in place."""
        dist.all_reduce(x, group=group)
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

    def of_each(self, value: T, group: Any = None) -> list[T]:
        """Returns the ranks' values, any but tensors, in their order."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value, group)
        return found

    def barrier(self) -> None:
        """Waits until every rank has called this."""
        self.sum(torch.zeros(())).item()

    def patient_group(self) -> Any:
        """Makes a group of all ranks whose collective operations wait up to 30 days."""
        return dist.new_group(backend="gloo", timeout=PATIENCE) if self.size > 1 else None

    def on_main(
        self,
        work: Callable[[], T],
        *,
        patient: bool = False,
        group: Any = None,
    ) -> T:
        """Calls `work` on the main rank; every rank returns its result or raises its `UserError`.

        The other ranks wait: up to the timeout of the backend or `group`, or up to 30 days if
        `patient`.
        """
        # the default timeout is half an hour; the group is made while all ranks are here
        if patient:
            group = self.patient_group()
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


def collectives_begun() -> int:
    """Counts the collective operations that this rank has begun, in all of its groups."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def limit_waits(device_type: str) -> None:
    """Sets when NCCL gives up a collective operation, in all groups that have been made.

    A timeout given to PyTorch when they are made would be gloo's as well.
    """
    for group in dist.distributed_c10d._world.pg_map if device_type == "cuda" else ():
        if dist.get_backend_config(group) == dist.get_backend_config():  # it has both
            group._get_backend(torch.device("cuda"))._set_default_timeout(NCCL_TIMEOUT)


def start(device_type: str) -> World:
    """Joins torchrun's process group, if any: gloo for CPU tensors, the device's for its own.

    Raises:
        UserError: there are fewer devices than ranks, or a rank does not arrive.
    """
    global _lifeline, _stopping
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
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    if _stopping is None and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun set it
        alone = world.local_size == world.size
        _stopping = follow_launcher(saves=alone, speaks=world.local_rank == 0)
    _take_device(device_type, world)
    if not dist.is_initialized():
        backend, store = kind_of(device_type).backend, _meeting(world)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
        if world.size > 1:
            _lifeline = Lifeline(world.rank, world.size, world.from_main)
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


def _meeting(world: World) -> Any:
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
    own, ranks = secrets.token_hex(8), range(world.size)
    store.set(f"name/{world.rank}", own)
    until, start, late = time.monotonic() + seconds, None, 0
    while late is not None:
        if time.monotonic() > until:
            raise UserError(f"rank {late} did not arrive within {seconds:g} s: {longer}")
        if world.is_main:
            names = [store.get(f"name/{i}") for i in ranks if store.check([f"name/{i}"])]
            for name in names:
                store.set(f"start/{name.decode()}", own)
        if store.check([f"start/{own}"]):
            prefix = store.get(f"start/{own}").decode()
            start = PrefixStore(prefix, store)
            start.set(f"arrived/{world.rank}", "")
            late = next((i for i in ranks if not start.check([f"arrived/{i}"])), None)
        time.sleep(0.02)  # the store's own wait prints warnings
    return start


@contextmanager
def ending_together() -> Iterator[None]:
    """Makes a failure of any rank end all ranks within seconds, the failed one's message first.

    Without an error it leaves the process group. After one that would wait for other ranks, which
    may wait for this one, so the process ends at once.
    """
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            _leave(error)
        raise
    if _lifeline is not None:
        _lifeline.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave(error: BaseException) -> None:
    """Ends this process after `error`, which `SystemExit` says has been shown already."""
    cause = error.__context__ if isinstance(error, SystemExit) else error
    # of gloo, whose errors have no class of their own, or of NCCL: the end of another rank
    collective = isinstance(error, dist.DistError) or "gloo" in str(error)
    told = isinstance(cause, OtherRankError)  # the main rank prints it, once it has tidied up
    if _lifeline is not None and (collective or told):
        # the rank that failed first speaks, and the lifeline's thread ends this one
        time.sleep(2 * GRACE_S if _lifeline.loss.wait(ARRIVAL_S if told else GRACE_S) else 0)
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        tell_torchrun("".join(traceback.format_exception_only(error)).strip())
    sys.stdout.flush()
    sys.stderr.flush()
    if _lifeline is not None:
        _lifeline.say(FAILED)
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def on_stall(report: Callable[[], None]) -> None:
    """Makes `report` be called if any rank stalls, just before this process ends."""
    if _lifeline is not None:
        _lifeline.report = report


def end_stalled(report: Callable[[], None]) -> None:
    """Ends all ranks because this one makes no progress; each calls its report first."""
    if _lifeline is None:
        report()
        os._exit(1)
    if not _lifeline.loss.is_set():
        _lifeline.end_after(_lifeline.rank, STALLED)


class Stopped(Exception):  # noqa: N818
    """Raised by all ranks at the same place after a signal asked the run to stop."""


class StopSignal:
    """Handles SIGINT (Ctrl-C) and SIGTERM as requests to stop; a second one ends the process.

    SIGUSR1, which batch systems send before a time limit, also sets `requeue`. The SIGTERM that
    follows at the limit does not cut the save short. Nor does a second SIGHUP: a terminal that is
    closed sends it, and so may its shell. Under `nohup` SIGHUP stays ignored.
    """

    # both end the process, although a shell script ignores SIGINT in its `&` commands
    DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}  # noqa: RUF012

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self.requeue = False
        self.say = say
        more = [getattr(signal, x) for x in ("SIGUSR1", "SIGHUP") if hasattr(signal, x)]
        if more and signal.getsignal(more[-1]) == signal.SIG_IGN:
            more.pop()
        numbers = [*self.DEFAULTS, *more]
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if _stopping is not None:
            _stopping.set()
        if number in self.DEFAULTS:
            self._set(self.DEFAULTS)
        self.requeue |= self.received.name == "SIGUSR1"
        if _lifeline is not None and _lifeline.loss.is_set():  # torchrun ends the other ranks
            return
        with suppress(RuntimeError):  # the signal came in the middle of a write to the terminal
            again = "press Ctrl-C" if number == signal.SIGINT else "send it"
            rest = f"; {again} again to stop at once, without saving"
            self.say(
                f"{self.received.name}: stopping after this micro-step or evaluation batch, and"
                f" saving{rest if number in self.DEFAULTS else ''}"
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


class Agreed:
    """A `StopSignal` whose `received` is the same on all ranks, which read it together."""

    def __init__(self, stop: StopSignal, world: World) -> None:
        self._stop, self._world = stop, world

    @property
    def received(self) -> bool:
        return self._stop.agreed(self._world)
