"""Connections between ranks that tell how each of them ended."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

from fastgpt.faults import failure
from fastgpt.faults.failure import DONE, PeerMonitor


def joined(rank, broadcast):
    peer_monitor = PeerMonitor()
    peer_monitor.start()
    peer_monitor.connect(rank, 2, broadcast)
    return peer_monitor


def test_a_rank_that_hears_that_the_main_rank_is_done_does_not_seem_killed(monkeypatch):
    """Two strangers connect to the main rank before the other one does; the second says nothing."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(failure, "HELLO_S", 1)
    noticed, said = [], Queue()
    monkeypatch.setattr(PeerMonitor, "end_after", lambda _, *end: noticed.append(end))
    with ThreadPoolExecutor(1) as thread:
        thread_of_main = thread.submit(joined, 0, said.put)
        place = said.get()
        address = ("localhost", place[0])
        with socket.create_connection(address) as stranger, socket.create_connection(address):
            stranger.send(b"GET / HTTP/1.1\r\n\r\n")
            other = joined(1, lambda _: place)
            main = thread_of_main.result(timeout=10)
    main.say(DONE)  # and is interrupted before its thread ends
    time.sleep(0.5)
    assert noticed == []
    other.say(DONE)
    other.close()
    time.sleep(0.5)
    main.close()
    assert noticed == []
