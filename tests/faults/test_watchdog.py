"""A run that makes no progress ends, and leaves the Python stacks of the rank that stalled."""

import faulthandler
import time
from types import SimpleNamespace

import pytest

from fastgpt.errors import UserError
from fastgpt.faults import watchdog
from fastgpt.faults.watchdog import AGAIN_S, SLOW_S
from fastgpt.train.plan import configure
from tests.processes import python
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


def test_a_rank_that_sleeps_in_its_data_ends_all_and_its_stacks_are_there(tiny, tmp_path):
    script, seen = tmp_path / "sleeps.py", tmp_path / "seen"
    script.write_text(SLEEPS_IN_ITS_DATA)
    flags = "--eval-every 0 --train.micro-batch 2 --train.stall-s 4"
    process = torchrun(2, str(script), *tiny(flags), forks=True, SEEN=str(seen))
    _, err = process.communicate(timeout=120)
    assert time.time() - seen.stat().st_mtime < 4 + 20
    assert process.returncode == 1
    assert "Timeout (0:00:05)!" in err
    assert " in sleepy\n" in err
    assert " in train_step\n" in err


HANGS = """
import ctypes
from fastgpt.faults import watchdog

def hangs():
    ctypes.PyDLL(None).sleep(60)

watchdog.start(0.1)
watchdog.progress()
hangs()
"""


def test_native_code_that_keeps_pythons_lock_is_ended():
    began = time.monotonic()
    done = python("-c", HANGS)
    assert time.monotonic() - began < 40
    assert done.returncode == 1
    assert " in hangs\n" in done.stderr


@pytest.fixture
def timers(monkeypatch):
    """Seconds of the timers that were set, None where one was cancelled; and a clock to set."""
    found, clock = [], [100.0]
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda seconds, **how: found.append(seconds)
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: found.append(None))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watchdog, "_next", 0.0)
    return found, clock


def test_progress_sets_another_timer_and_what_is_slow_is_given_more_time(timers):
    found, clock = timers
    short, long = 4 + AGAIN_S, SLOW_S + AGAIN_S
    watchdog.start(4)
    watchdog.progress()
    assert found == [long, short]
    clock[0] += AGAIN_S / 2  # too soon for another timer
    watchdog.progress()
    assert found == [long, short]
    clock[0] += AGAIN_S / 2
    watchdog.progress()
    watchdog.progress(slow=True)
    watchdog.start(2 * SLOW_S)
    watchdog.close()
    assert found[2:] == [short, long, 2 * SLOW_S + AGAIN_S, None]


def test_zero_means_never_and_outside_of_training_nothing_stalls(timers, fit):
    watchdog.progress(slow=True)
    watchdog.start(0)
    watchdog.progress()
    assert timers[0] == []
    fit("--train.stall-s 5 --train.sample-tokens 0")
    *seconds, last = timers[0]
    assert last is None
    assert {*seconds} == {5 + AGAIN_S, SLOW_S + AGAIN_S}
    watchdog.progress(slow=True)
    assert timers[0][-1] is None


def test_a_negative_time_is_refused(tiny):
    with pytest.raises(UserError, match=r"--train.stall-s is -1.0: expected 0 or more"):
        configure(tiny("--train.stall-s -1"))
