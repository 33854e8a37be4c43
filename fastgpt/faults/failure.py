"""Ends all ranks within seconds after one has failed, and leaves the last word to that one.

A rank that waits in a collective operation may not notice that another one has ended: NCCL waits
for half an hour, and signals are not handled meanwhile. So every rank keeps a connection to the
main rank, which the system closes when a process ends, in whatever way. A thread watches it.
Another thread watches the launcher, torchrun, whose ranks would go on without it.
"""

import atexit
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import cast

import torch.distributed as dist

from fastgpt.errors import OtherRankError, tell_torchrun
from fastgpt.require_torch import STARTED
from fastgpt.terminal import print_line

DONE, FAILED, KILLED, STALLED = "done", "failed", "killed", "stalled"
"""How a rank ended: it is done; it failed and said why; its connection closed without a word; or it
makes no progress, for which each rank writes a report."""
GRACE_S = 2.0
"""Seconds in which a rank may end with a message of its own after another one has failed. torchrun
notices the first failure within a tenth of a second, and reports that one."""
HELLO_S = 5
"""Seconds in which whoever connects to the main rank must say which rank it is."""
RANK_BYTES = 4
LOOK_S = 1.0
"""Seconds between two looks at the launcher."""
ARRIVAL_S = 25.0
"""Seconds that ranks wait for each other when they start; $FASTGPT_ARRIVAL_S replaces it."""
ORPHAN_S = 7.0
"""Seconds in which a rank may save after its launcher has ended."""


class Lifeline:
    """Connection of a rank to the main rank; on the main rank, the connections of all others.

    Args:
        rank: rank of this process; 0 is the main rank.
        size: number of ranks.
        broadcast_object: broadcasts the main rank's value to every rank.

    Raises:
        OSError: the main rank cannot be reached.
    """

    def __init__(self, rank: int, size: int, broadcast_object: Callable) -> None:
        self.rank = rank
        self.loss = threading.Event()
        """Set when another rank has ended without being done."""
        self.report: Callable[[], None] = lambda: None
        """Called if a rank has stalled."""
        self.links: dict[Connection, int] = {}
        if rank == 0:
            key = secrets.token_bytes(16)
            with socket.create_server(("", 0), backlog=size) as server:
                broadcast_object((server.getsockname()[1], key))
                while len(self.links) < size - 1:
                    self._accept(server.accept()[0], key)
        else:
            port, key = broadcast_object(None)
            peer = socket.create_connection((os.environ["MASTER_ADDR"], port))
            link = Connection(peer.detach())
            link.send_bytes(key + rank.to_bytes(RANK_BYTES))
            self.links[link] = 0
        self._wake, self._woken = Pipe()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def _accept(self, peer: socket.socket, key: bytes) -> None:
        # a stranger's connection may be silent: its bytes are waited for no longer than this
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_S, 0))
        link = Connection(peer.detach())
        with suppress(EOFError, OSError):
            hello = link.recv_bytes(len(key) + RANK_BYTES)
            if secrets.compare_digest(hello[: len(key)], key):
                self.links[link] = int.from_bytes(hello[len(key) :])

    def close(self) -> None:
        """Tells the others that this rank is done, and ends the thread.

        A thread that is left over when Python ends may abort the process.
        """
        self.say(DONE)
        self._wake.send(None)
        self._thread.join()

    def say(self, word: str, about: int | None = None) -> None:
        """Tells the others how this rank ends, or another one, `about`."""
        for link, other in self.links.items():
            if other != about:
                with suppress(OSError):
                    link.send((word, self.rank if about is None else about))

    def _watch(self) -> None:
        watched = [*self.links, self._woken]  # left open: closed, this process would seem killed
        while True:
            for link in cast("list[Connection]", wait(watched)):
                if link is self._woken:
                    return
                watched.remove(link)
                try:
                    word, about = link.recv()
                except (EOFError, OSError):
                    word, about = KILLED, self.links[link]
                if word != DONE and not self.loss.is_set():
                    self.end_after(about, word)

    def end_after(self, rank: int, word: str) -> None:
        """Ends this process, and tells the others to, after `rank` has ended as `word` says."""
        self.loss.set()
        self.say(word, rank)
        if word == KILLED and self.rank == (1 if rank == 0 else 0):
            print_line(
                f"error: rank {rank} ended without an error message, as if it was killed (was"
                " memory short?): all ranks end"
            )
        if word == STALLED:
            self.report()
        threading.Event().wait(GRACE_S)
        os._exit(1)


def follow_launcher(*, saves: bool, speaks: bool) -> threading.Event:
    """Makes this process end within ten seconds after the one that started it, its launcher.

    A process whose parent ends, in whatever way, gets another one, and a thread looks for that.

    Args:
        saves: the rank saves first, as after SIGTERM. That stops the ranks on all machines with
            status 0, so it is for jobs on one machine; those on several start again.
        speaks: writes a line about it on stderr.

    Returns:
        threading.Event: set by the caller if this rank was asked to stop: it then ends by itself,
            and its save has as much time as it takes.
    """
    process, parent = STARTED
    launcher = parent if process == os.getpid() else os.getppid()  # else it was forked since
    stopping, closed = threading.Event(), threading.Event()

    def watch() -> None:
        while os.getppid() == launcher:
            if closed.wait(LOOK_S):
                return
        if stopping.is_set():
            return
        if speaks:
            what = f"saving, and ending within {ORPHAN_S:.0f} s" if saves else "ending"
            with suppress(OSError):
                print_line(f"error: torchrun (process {launcher}) has ended: {what}")
        if saves:
            os.kill(os.getpid(), signal.SIGTERM)
        if not (saves and closed.wait(ORPHAN_S)):
            os._exit(1)

    thread = threading.Thread(target=watch, name="launcher", daemon=True)
    thread.start()
    atexit.register(lambda: (closed.set(), thread.join()))
    return stopping


# --- of this process ------------------------------------------------------------------------------

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
