"""Ends all ranks within seconds after one has failed, and leaves the last word to that one.

A rank that waits in a collective operation may not notice that another one has ended: NCCL waits
for half an hour, and signals are not handled meanwhile. Nor does a rank end with torchrun. So each
has a thread that watches its launcher, and a connection to the main rank, which the system closes
when a process ends, in whatever way.
"""

import atexit
import math
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

DONE, FAILED, KILLED = "done", "failed", "killed"
"""How a rank ended: it is done; it failed and said why; or its connection closed without a word."""
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


class PeerMonitor:
    """Thread that ends this process after another rank has failed, or torchrun has ended."""

    def __init__(self) -> None:
        self.rank, self.links = 0, dict[Connection, int]()
        """The other ends of its connections: the main rank; on that one, all others."""
        self.loss = threading.Event()
        """Set when another rank has ended without being done."""
        self.stopping = False
        """True once a signal has asked this rank to stop."""
        self._thread, self._orphaned, self._until = None, False, math.inf

    def start(self) -> None:
        """Starts the thread, if it does not run."""
        if self._thread is not None:
            return
        process, parent = STARTED
        self._launcher = parent if process == os.getpid() else os.getppid()  # forked since
        self._wake, self._woken = Pipe()
        self._thread = threading.Thread(target=self._watch, name="peer_monitor", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the thread: one that is left over when Python ends may abort the process."""
        if self._thread is not None:
            self._wake.send(False)
            self._thread.join()
            self._thread = None

    def connect(self, rank: int, size: int, broadcast_object: Callable) -> None:
        """Connects the ranks; a collective operation, by `World.broadcast_object`."""
        self.rank, links = rank, {}
        if rank == 0:
            key = secrets.token_bytes(16)
            with socket.create_server(("", 0), backlog=size) as server:
                broadcast_object((server.getsockname()[1], key))
                while len(links) < size - 1:
                    links |= _greeted(server.accept()[0], key)
        else:
            port, key = broadcast_object(None)
            link = Connection(socket.create_connection((os.environ["MASTER_ADDR"], port)).detach())
            link.send_bytes(key + rank.to_bytes(RANK_BYTES))
            links[link] = 0
        self.links = links
        self._wake.send(True)

    def say(self, word: str, about: int | None = None) -> None:
        """Tells the others how this rank ends, or another one, `about`."""
        for link, other in self.links.items():
            if other != about:
                with suppress(OSError):
                    link.send((word, self.rank if about is None else about))

    def _watch(self) -> None:
        ended: set[Connection] = set()  # left open: closed, this process would seem killed
        goes_on = True
        while goes_on:
            watched = [self._woken, *(link for link in self.links if link not in ended)]
            for link in cast("list[Connection]", wait(watched, LOOK_S)):
                if link is self._woken:
                    goes_on = link.recv()
                    continue
                ended.add(link)
                try:
                    word, about = link.recv()
                except (EOFError, OSError):
                    word, about = KILLED, self.links[link]
                if word != DONE:
                    self.end_after(about, word)
            # a process whose parent ends, in whatever way, gets another one
            if os.getppid() != self._launcher and not self._orphaned:
                self._orphaned = True
                self._end_without_launcher()
            if time.monotonic() > self._until:
                os._exit(1)

    def _end_without_launcher(self) -> None:
        """Begins to end this process, if torchrun started it, and nothing has begun to end it.

        On one machine the rank saves first, as after SIGTERM. That would stop the ranks on all
        machines with status 0, and a job on several is to start again.
        """
        if self.stopping or "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        saves = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        if os.environ["LOCAL_RANK"] == "0":
            what = f"saving, and ending within {ORPHAN_S:.0f} s" if saves else "ending"
            with suppress(OSError):
                print_line(f"error: torchrun (process {self._launcher}) has ended: {what}")
        if not saves:
            os._exit(1)
        self._until = time.monotonic() + ORPHAN_S
        os.kill(os.getpid(), signal.SIGTERM)

    def end_after(self, rank: int, word: str) -> None:
        """Ends this process, and tells the others to, after `rank` has ended as `word` says."""
        self.loss.set()
        self.say(word, rank)
        if word == KILLED and self.rank == (1 if rank == 0 else 0):
            print_line(
                f"error: rank {rank} ended without an error message, as if it was killed (was"
                " memory short?) or stalled: all ranks end"
            )
        time.sleep(GRACE_S)
        os._exit(1)


def _greeted(peer: socket.socket, key: bytes) -> dict[Connection, int]:
    """Returns the connection of a rank, which says `key` and its number; of a stranger nothing."""
    # a stranger may be silent: its bytes are waited for no longer than this
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_S, 0))
    link = Connection(peer.detach())
    with suppress(EOFError, OSError):
        hello = link.recv_bytes(len(key) + RANK_BYTES)
        if secrets.compare_digest(hello[: len(key)], key):
            return {link: int.from_bytes(hello[len(key) :])}
    return {}


peer_monitor = PeerMonitor()
"""That of this process: it watches nothing before it is started."""


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
    peer_monitor.say(DONE)
    peer_monitor.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave(error: BaseException) -> None:
    """Ends this process after `error`, which `SystemExit` says has been shown already."""
    cause = error.__context__ if isinstance(error, SystemExit) else error
    # of gloo, whose errors have no class of their own, or of NCCL: the end of another rank
    collective = isinstance(error, dist.DistError) or "gloo" in str(error)
    reported = isinstance(cause, OtherRankError)  # the main rank prints it, once it has tidied up
    if collective or reported:
        # the rank that failed first speaks, and the peer monitor's thread ends this one
        time.sleep(2 * GRACE_S if peer_monitor.loss.wait(ARRIVAL_S if reported else GRACE_S) else 0)
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        tell_torchrun("".join(traceback.format_exception_only(error)).strip())
    sys.stdout.flush()
    sys.stderr.flush()
    peer_monitor.say(FAILED)
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
