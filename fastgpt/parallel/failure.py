"""A failure of any rank ends all ranks within seconds, the failed one's message first."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fastgpt.errors import OtherRankError, tell_torchrun
from fastgpt.parallel.lifeline import FAILED, GRACE_S, STALLED, Lifeline, follow_launcher

ARRIVAL_S = 25.0
"""Seconds that ranks wait for each other when they start; $FASTGPT_ARRIVAL_S replaces it."""
_lifeline: Lifeline | None = None


_stopping: threading.Event | None = None
"""Set when a signal has asked a rank of torchrun's to stop."""


def watch_launcher(*, saves: bool, speaks: bool) -> None:
    """Begins to watch torchrun, if it has started this process: see `follow_launcher`."""
    global _stopping
    if _stopping is None and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun set it
        _stopping = follow_launcher(saves=saves, speaks=speaks)


def watch_ranks(rank: int, size: int, broadcast: Callable) -> None:
    """Begins to watch the other ranks: see `Lifeline`; a collective operation."""
    global _lifeline
    _lifeline = Lifeline(rank, size, broadcast)


def stop_begins() -> bool:
    """Notes that a signal asks this rank to stop; returns True if another rank has ended before."""
    if _stopping is not None:
        _stopping.set()
    return _lifeline is not None and _lifeline.loss.is_set()


@contextmanager
def abort_all_ranks() -> Iterator[None]:
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
