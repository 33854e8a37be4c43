"""Signals that ask a run to stop, which all ranks then do at the same place."""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import torch

from fastgpt.faults.failure import peer_monitor
from fastgpt.parallel.distributed import World

REQUEUE = 75
"""Exit status of a run that SIGUSR1 stopped: this job should be queued again (EX_TEMPFAIL)."""
REPEATED_S = 0.5
"""Seconds in which the same request to stop counts once."""


class Stopped(Exception):  # noqa: N818
    """Raised by all ranks at the same place after a signal asked the run to stop."""


class StopSignal:
    """Handles SIGINT (Ctrl-C) and SIGTERM as requests to stop; a later one ends the process.

    Python lets only the main thread handle signals: in another thread there are no handlers.

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
        main = threading.current_thread() is threading.main_thread()
        numbers = [*self.DEFAULTS, *more] if main else []
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        peer_monitor.stopping = True
        if number in self.DEFAULTS:  # timeout and other wrappers pass on what the terminal sent too
            self._set(dict.fromkeys(self.DEFAULTS, signal.SIG_IGN))
        self.requeue |= self.received.name == "SIGUSR1"
        if not peer_monitor.loss.is_set():  # else torchrun ends the other ranks
            self._tell(self.received)
        if number in self.DEFAULTS:
            time.sleep(REPEATED_S)
            self._set(self.DEFAULTS)

    def _tell(self, received: signal.Signals) -> None:
        with suppress(RuntimeError):  # the signal came in the middle of a write to the terminal
            again = "press Ctrl-C" if received == signal.SIGINT else "send it"
            rest = f"; {again} again to stop at once, without saving"
            self.say(
                f"{received.name}: stopping after this micro-step or evaluation batch, and"
                f" saving{rest if received in self.DEFAULTS else ''}"
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

        Before a collective operation, where `ranks_meet`, every rank must call this. At other
        places a rank that was asked to stop waits here for the next such call.
        """
        if (ranks_meet or self.received) and self.agreed(world):
            raise Stopped

    def agreed(self, world: World) -> bool:
        """Returns True if any rank was asked to stop, by a CPU collective without a device sync."""
        return bool(world.sum(torch.tensor(int(self.received is not None))))


class SyncedStop:
    """A `StopSignal` whose `received` is the same on all ranks, which read it together."""

    def __init__(self, stop: StopSignal, world: World) -> None:
        self._stop, self._world = stop, world

    @property
    def received(self) -> bool:
        return self._stop.agreed(self._world)
