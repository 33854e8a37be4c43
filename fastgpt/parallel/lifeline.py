"""Ends all ranks within seconds after one has failed, and leaves the last word to that one.

A rank that waits in a collective operation may not notice that another one has ended: NCCL waits
for ten minutes or longer, and signals are not handled meanwhile. So every rank keeps a connection
to the main rank, which the system closes when a process ends, in whatever way. A thread watches it.
Another thread watches the launcher, torchrun, whose ranks would go on without it.
"""

import atexit
import os
import secrets
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from fastgpt.require_torch import STARTED
from fastgpt.terminal import print_line

DONE, FAILED, KILLED, STALLED = b"D", b"F", b"K", b"S"
"""How a rank ended: it is done; it failed and said why; its connection closed without a word; or it
makes no progress, for which each rank writes a report."""
TOKEN_BYTES, RANK_BYTES = 16, 4
GRACE_S = 2.0
"""Seconds in which a rank may end with a message of its own after another one has failed. torchrun
notices the first failure within a tenth of a second, and reports that one."""
LOOK_S = 1.0
"""Seconds between two looks at the launcher."""
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
        self.loss = threading.Event()
        """Set when another rank has ended without being done."""
        self.report: Callable[[], None] = lambda: None
        """Called if a rank has stalled."""
        self.links: dict[socket.socket, int] = {}
        self.rank, server, mine = rank, None, None
        if rank == 0:
            server = socket.create_server(("", 0), backlog=size)
            mine = server.getsockname()[1], secrets.token_bytes(TOKEN_BYTES)
        port, self.token = broadcast_object(mine)
        if server is None:
            link = socket.create_connection((os.environ["MASTER_ADDR"], port))
            link.sendall(self.token + rank.to_bytes(RANK_BYTES))
            self.links[link] = 0
        self._wake, woken = socket.socketpair()
        watch = partial(self._watch, server, woken)
        self._thread = threading.Thread(target=watch, name="lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells the others that this rank is done, and ends the thread.

        A thread that is left over when Python ends may abort the process.
        """
        self.say(DONE)
        self._wake.send(b".")
        self._thread.join()

    def say(self, word: bytes) -> None:
        """Tells the others how this rank ends."""
        for link in list(self.links):
            with suppress(OSError):
                link.sendall(word + self.rank.to_bytes(RANK_BYTES))

    def _watch(self, server: socket.socket | None, woken: socket.socket) -> None:
        done: set[socket.socket] = set()  # they stay open: closed, this process would seem killed
        while True:
            links = self.links.keys() - done
            ready, _, _ = select.select([*links, woken, *([server] if server else [])], [], [])
            if woken in ready:
                return
            for link in ready:
                if server is not None and link is server:
                    self._accept(*server.accept())
                    continue
                word, about = _received(link, self.links[link])
                if word != DONE and not self.loss.is_set():
                    self.end_after(about, word)
                done.add(link)

    def _accept(self, link: socket.socket, _address: object) -> None:
        link.settimeout(5)  # a stranger's connection may be silent
        with suppress(OSError):
            hello = link.recv(TOKEN_BYTES + RANK_BYTES, socket.MSG_WAITALL)
            if secrets.compare_digest(hello[:TOKEN_BYTES], self.token):
                link.settimeout(None)
                self.links[link] = int.from_bytes(hello[TOKEN_BYTES:])

    def end_after(self, rank: int, word: bytes) -> None:
        """Ends this process, and tells the others to, after `rank` has ended as `word` says."""
        self.loss.set()
        for link, other in self.links.items():
            if other != rank:
                with suppress(OSError):
                    link.sendall(word + rank.to_bytes(RANK_BYTES))
        if word == KILLED and self.rank == (1 if rank == 0 else 0):
            print_line(
                f"error: rank {rank} ended without an error message, as if it was killed (was"
                " memory short?): all ranks end"
            )
        if word == STALLED:
            self.report()
        threading.Event().wait(GRACE_S)
        os._exit(1)


def _received(link: socket.socket, sender: int) -> tuple[bytes, int]:
    """Receives how a rank ended, and which one; a closed connection is about its sender."""
    with suppress(OSError):
        if message := link.recv(1 + RANK_BYTES, socket.MSG_WAITALL):
            return message[:1], int.from_bytes(message[1:])
    return KILLED, sender


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
