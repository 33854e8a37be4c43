"""Settings of a process for training on a CPU: how threads wait, what is imported."""

import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastgpt.device import cpu
from tests.processes import python

BUSY, CALM, IDLE = (200, 250), (480, 1), (1, 1)
"""Milliseconds between two looks in which the thread ran, and waited for a core."""


@pytest.fixture
def looks(monkeypatch):
    """Returns a function that looks once after each pair of times, and lists what followed."""
    monkeypatch.setattr(cpu, "cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def look(*times):
        total, held, sleeps = (0, 0), [], []
        totals = [total := (total[0] + ran, total[1] + waited) for ran, waited in times]
        nanoseconds = iter([(0, 0), *((ran * 10**6, waited * 10**6) for ran, waited in totals)])
        monkeypatch.setattr(cpu, "_times", lambda _: next(nanoseconds))
        monkeypatch.setattr(cpu, "_hold_threads", held.append)
        monkeypatch.setattr(time, "sleep", lambda _: sleeps.append(sleeping()))
        sleeping = lambda: any(not let_go.is_set() for let_go in held)  # noqa: E731
        there = iter([True] * len(times))
        schedstat = mock.Mock(exists=lambda: next(there, None) or sleeps.append(sleeping()))
        cpu.adapt_spinning(schedstat)
        assert not sleeping(), "the threads of an ended watch sleep on"
        assert len({*held}) * 3 == len(held), "three teams have more threads than cores"
        return sleeps[1:]

    return look


def test_threads_sleep_while_other_programs_need_the_cores(looks):
    found = looks(
        CALM, BUSY, IDLE, BUSY, CALM, CALM, CALM, BUSY, *[CALM] * 2, IDLE, CALM, CALM, CALM
    )
    assert found == [False, *[True] * 11, False, False]
    assert looks(CALM, BUSY) == [False, True]


TEAM = """
import os, threading, time, torch
from fastgpt.device import cpu

def wait_for(threads):
    end = time.monotonic() + 60
    while (found := len(os.listdir("/proc/self/task"))) != threads:
        assert time.monotonic() < end, (found, threads)
        time.sleep(0.01)

torch.set_num_threads(3)
torch.zeros(2**20).add_(1)
before, let_go = len(os.listdir("/proc/self/task")), threading.Event()
threading.Thread(target=cpu._hold_threads, args=(let_go,)).start()
wait_for(before + 3)
let_go.set()
wait_for(before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux counts threads there")
def test_a_thread_holds_a_team_until_it_is_let_go():
    assert python("-c", TEAM, OMP_NUM_THREADS=None).stderr == ""
