"""A run that makes no progress ends, and leaves the Python stacks of all ranks behind."""

import re
import time

import pytest

from fastgpt.cli import parse
from fastgpt.errors import UserError
from fastgpt.faults import failure, watchdog
from fastgpt.faults.watchdog import Watchdog
from tests.runs import torchrun

SLEEPS_IN_ITS_DATA = """
import os, pathlib, time
import train
from fastgpt.data.loader import Loader

batches, take = [], Loader.next

def sleepy(self):
    batches.append(1)
    if len(batches) == 6 and os.environ["RANK"] == "1":
        pathlib.Path(os.environ["SEEN"]).touch()
        time.sleep(600)
    return take(self)

Loader.next = sleepy
train.main()
"""


def test_a_rank_that_sleeps_in_its_data_ends_all_and_the_stacks_of_all_are_there(tiny, tmp_path):
    script, seen = tmp_path / "sleeps.py", tmp_path / "seen"
    script.write_text(SLEEPS_IN_ITS_DATA)
    flags = "--eval-every 0 --train.micro-batch 2 --train.stall-s 4"
    process = torchrun(2, str(script), *tiny(flags), forks=True, SEEN=str(seen))
    _, err = process.communicate(timeout=120)
    assert time.time() - seen.stat().st_mtime < 4 + 20
    assert process.returncode == 1
    found = re.findall(r"^rank (\d), MainThread, the innermost call first:\n((  .*\n)+)", err, re.M)
    stacks = {rank: calls for rank, calls, _ in found}
    assert "in sleepy" in stacks["1"]
    assert "in sleepy" not in stacks["0"]
    assert all("in train_step\n" in calls and "in main\n" in calls for calls in stacks.values())
    said = re.findall(r"error: rank (\d) has made no progress for (\d+) s \((.*?)\): all", err)
    said = {rank: (int(seconds), what) for rank, seconds, what in said}
    assert said["1"] == (4, "step 3, micro-step 2 of 2: reading a batch")
    assert said["0"][0] in (3, 4), "the one that waits had begun a little later"
    assert said["0"][1].startswith("step 3")


@pytest.fixture
def ended(monkeypatch):
    """Reports that were asked for, in place of the end of this process."""
    asked = []
    monkeypatch.setattr(failure, "end_stalled", asked.append)
    monkeypatch.setattr(watchdog, "SLOW_S", 2.0)
    return asked


@pytest.mark.parametrize(("slow", "pause", "ends"), [(0, 30, True), (1, 0.8, False), (1, 30, True)])
def test_a_slow_phase_is_given_more_time_and_progress_starts_anew(slow, pause, ends, ended):
    dog = Watchdog(0.4, 0)
    dog.start()
    for _ in range(5):
        dog.doing("training")
        time.sleep(0.1)
    dog.doing("training", slow=bool(slow))
    end = time.monotonic() + pause
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    dog.close()
    assert ended == [dog.report] * ends


def test_the_first_phase_of_a_name_may_compile_and_zero_means_never(ended):
    dogs = [Watchdog(seconds, 0) for seconds in (0.2, 0)]
    for dog in dogs:
        dog.start()
        dog.doing("forward and backward")
    time.sleep(0.4)
    dogs[0].close()
    time.sleep(0.4)
    dogs[1].close()
    assert ended == []


def test_a_negative_time_is_refused(tiny):
    with pytest.raises(UserError, match=r"--train.stall-s is -1.0: expected 0 or more"):
        parse(tiny("--train.stall-s -1"))
