"""Connections between ranks that tell how each of them ended."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest

from fastgpt.faults import failure
from fastgpt.faults.failure import DONE, KILLED, PeerMonitor


def joined(rank, broadcast):
    peer_monitor = PeerMonitor()
    peer_monitor.start()
    peer_monitor.connect(rank, 2, broadcast)
    return peer_monitor


@pytest.fixture
def pair(monkeypatch):
    """Two ranks in this process, and what a failure that they noticed was: (rank, word).

    Two strangers connect to the main rank before the other one does; the second says nothing.
    """
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(failure, "HELLO_S", 1)
    noticed, said = [], Queue()
    monkeypatch.setattr(PeerMonitor, "end_after", lambda _, *end: noticed.append(end))
    with ThreadPoolExecutor(1) as thread:
        main = thread.submit(joined, 0, said.put)
        place = said.get()
        with (
            socket.create_connection(("localhost", place[0])) as stranger,
            socket.create_connection(("localhost", place[0])),
        ):
            stranger.send(b"GET / HTTP/1.1\r\n\r\n")
            other = joined(1, lambda _: place)
            started = main.result(timeout=10)
    yield started, other, noticed
    other.close()
    started.close()


def soon(condition, seconds=0.5):
    """True if the condition becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_rank_that_hears_that_the_main_rank_is_done_does_not_seem_killed(pair):
    main, other, noticed = pair
    main.say(DONE)  # and is interrupted before its thread ends
    assert not soon(lambda: noticed)
    other.say(DONE)
    other.close()
    assert not soon(lambda: noticed)


def test_a_connection_that_closes_without_a_word_is_noticed(pair):
    _, other, noticed = pair
    for link in other.links:
        with socket.socket(fileno=os.dup(link.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
    assert soon(lambda: (1, KILLED) in noticed, seconds=10)
