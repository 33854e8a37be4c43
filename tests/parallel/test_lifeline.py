"""Connections between ranks that tell how each of them ended."""

import socket
import time

import pytest

from fastgpt.parallel.lifeline import DONE, KILLED, Lifeline


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks in this process, and what a failure that they noticed was: (rank, word)."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    noticed, said = [], []
    monkeypatch.setattr(Lifeline, "end_after", lambda _, rank, word: noticed.append((rank, word)))
    main = Lifeline(0, 2, lambda mine: said.append(mine) or mine)
    other = Lifeline(1, 2, lambda _: said[0])
    while not main.links:
        time.sleep(0.01)
    return main, other, noticed


def soon(condition, seconds=0.5):
    """True if the condition becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_rank_that_hears_that_the_main_rank_is_done_does_not_seem_killed(ranks):
    main, other, noticed = ranks
    main.say(DONE)  # and is interrupted before its thread ends
    assert not soon(lambda: noticed)
    other.close()
    assert not soon(lambda: noticed)
    main.close()


def test_a_connection_that_closes_without_a_word_is_noticed(ranks):
    main, other, noticed = ranks
    for link in other.links:
        link.shutdown(socket.SHUT_RDWR)
    assert soon(lambda: (1, KILLED) in noticed, seconds=10)
    main.close()
    other.close()
