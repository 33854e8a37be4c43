"""Settings of a process for training on a CPU: threads, how they wait, what is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastgpt.device import cpu
from fastgpt.files import cache_dir
from tests.runs import ROOT

BUSY, CALM, IDLE = (200, 250), (480, 1), (1, 1)
"""Milliseconds between two looks in which the thread ran, and waited for a core."""


@pytest.fixture
def looks(tmp_path):
    """Returns a function that looks once after each pair of times, and lists what followed."""
    schedstat, total = tmp_path / "schedstat", [0, 0]
    schedstat.write_text("0 0 0")
    waiting = cpu.Waiting(schedstat)

    def look(*times):
        sleeps = []
        for ran, waited in times:
            total[0] += ran * 10**6
            total[1] += waited * 10**6
            schedstat.write_text(f"{total[0]} {total[1]} 7\n")
            waiting.look()
            sleeps.append(waiting.let_go is not None)
        return sleeps

    yield look
    waiting.release()


def test_threads_sleep_while_other_programs_need_the_cores(looks):
    assert looks(CALM, BUSY, IDLE, BUSY) == [False, True, True, True]
    assert looks(CALM, CALM, CALM, BUSY, CALM) == [True] * 5
    assert looks(CALM, IDLE, CALM, CALM) == [True, True, True, False]
    assert looks(CALM, BUSY) == [False, True]


TEAM = """
import os, sys, time
import torch
from fastgpt.device import cpu

torch.set_num_threads(2)
torch.zeros(2**20).add_(1)

def threads():
    return len(os.listdir("/proc/self/task"))

def wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, threads()
        time.sleep(0.01)

busy = [(0, 0), (10**9, 10**9)]
values = iter([*busy, *((n * 10**9, 10**9) for n in range(2, 6))])
cpu._times = lambda _: next(values)
waiting, before = cpu.Waiting(cpu._schedstat()), threads()
waiting.look()
wait(lambda: threads() >= before + 2 * (cpu.cores() - 1))
for _ in range(cpu.CALM_LOOKS):
    waiting.look()
wait(lambda: threads() == before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux counts threads there")
def test_meanwhile_more_threads_than_cores_are_kept():
    environment = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", TEAM]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)


def test_a_thread_that_has_ended_is_not_watched_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "LOOK_S", 0.0)
    cpu.Waiting(tmp_path / "schedstat").watch()


# --- number of threads ----------------------------------------------------------------------------


@pytest.fixture
def four_cores(monkeypatch, tmp_path):
    """Returns a function that sets how long the work takes with each number of threads."""
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "_own_number", lambda: 4)
    monkeypatch.setattr(cpu, "_times", lambda _: (0, 0))  # this machine may be busy
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def take(*seconds):
        known = dict(zip((4, 2, 1), seconds))
        monkeypatch.setattr(cpu, "_seconds", lambda x, up, down, threads: known[threads])

    return take


def count(width=8):
    return cpu.thread_count(width, 16, torch.float32)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [((1.0, 2.0), 4), ((1.0, 0.5, 0.7), 2), ((1.0, 0.97, 0.96), 4), ((1.0, 0.9, 0.5), 1)],
)
def test_as_many_threads_as_are_clearly_fastest(four_cores, seconds, best):
    four_cores(*seconds)
    assert count() == best


def test_the_number_is_measured_once_for_each_width(four_cores):
    four_cores(1.0, 0.5, 0.7)
    assert count() == 2
    four_cores()  # would raise
    assert count() == 2
    with pytest.raises(KeyError):
        count(width=9)


@pytest.mark.parametrize("damage", ["{", "[1]", "{}", '"a"'])
def test_a_damaged_memory_is_measured_anew(four_cores, damage):
    four_cores(1.0, 0.5, 0.7)
    count()
    (cache_dir() / "threads.json").write_text(damage)
    assert count() == 2


def test_a_folder_that_cannot_be_written_to_costs_the_measurement_only(four_cores, tmp_path):
    (tmp_path / "threads.json").mkdir()
    four_cores(1.0, 0.5, 0.7)
    assert count() == 2


def test_the_work_is_done_with_each_number_of_threads(monkeypatch):
    monkeypatch.setattr(cpu, "PROXY_S", 0.01)
    before = torch.get_num_threads()
    assert 1 <= cpu._fastest(8, 16, torch.float32, before) <= before
    assert torch.get_num_threads() == before


def test_on_a_busy_machine_the_number_is_not_changed(four_cores, monkeypatch):
    four_cores(1.0, 0.5, 0.7)
    times = iter([(0, 0), (10**9, 10**9)])
    monkeypatch.setattr(cpu, "_times", lambda _: next(times))
    assert count() == 4
    monkeypatch.setattr(cpu, "_times", lambda _: (0, 0))
    assert count() == 2


@pytest.mark.parametrize(("variable", "alone"), [("1", True), (None, False)])
def test_a_number_from_outside_and_that_of_several_ranks_is_kept(monkeypatch, variable, alone):
    monkeypatch.setattr(cpu, "thread_count", None)
    monkeypatch.setattr(cpu, "_start_watching", lambda _: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    cpu.prepare(8, 16, torch.float32, compiled=False, alone=alone)


# --- imports --------------------------------------------------------------------------------------

RUN = """
import sys
from fastgpt.cli import main
main()
assert "torch._dynamo" not in sys.modules, "torch._dynamo was imported"
"""


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_that_compiles_nothing_does_not_import_dynamo(tiny, kind):
    argv = tiny(f"--optim.kind {kind} --train.device cpu --steps 2 --train.sample-tokens 4")
    subprocess.run([sys.executable, "-c", RUN, *argv], cwd=ROOT, check=True, timeout=120)
