"""A run that makes no progress ends, and leaves the Python stacks of the rank that stalled."""

import ctypes
import faulthandler
import os
import time
from types import SimpleNamespace

from fastgpt import cli
from fastgpt.data.loader import Loader
from fastgpt.faults import watchdog
from fastgpt.faults.watchdog import AGAIN_S
from tests.processes import Job, forked


def train_and_sleep(argv, seen):
    """Rank 1 sleeps while it reads its data."""
    batches, take, sleeps = [], Loader.next, os.environ["RANK"] == "1"

    def sleepy(self):
        batches.append(1)
        if len(batches) == 6 and sleeps:
            seen.touch()
            time.sleep(600)
        return take(self)

    # the other rank waits longer: two stacks written at once would be mixed
    Loader.next, watchdog.STALL_S = sleepy, 4 if sleeps else 30
    cli.main(argv)


def test_a_rank_that_sleeps_in_its_data_ends_all_and_its_stacks_are_there(tiny, tmp_path):
    argv, seen = tiny("--eval-every 0 --train.micro-batch 2"), tmp_path / "seen"
    with Job(2, train_and_sleep, argv, seen) as job:
        status, _, err = job.end()
    assert time.time() - seen.stat().st_mtime < 4 + 20
    assert status == 1
    assert "Timeout (0:00:05)!" in err
    assert " in sleepy\n" in err
    assert " in train\n" in err


def hang():
    watchdog.STALL_S = 0.1
    watchdog.start()
    ctypes.PyDLL(None).sleep(60)


def test_native_code_that_keeps_pythons_lock_is_ended():
    began = time.monotonic()
    done = forked(hang)
    assert time.monotonic() - began < 40
    assert done.returncode == 1
    assert " in hang\n" in done.stderr


def test_progress_sets_another_timer_in_training_alone_and_not_too_often(fit, monkeypatch):
    timers, clock, allowed = [], [100.0], watchdog.STALL_S + AGAIN_S
    later = lambda seconds, **how: timers.append(seconds)  # noqa: E731
    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: timers.append(None))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watchdog, "_next", 0.0)
    fit("--train.sample-tokens 0")
    clock[0] += AGAIN_S
    watchdog.progress()
    assert timers == [allowed, None]
    watchdog.start()
    clock[0] += AGAIN_S
    watchdog.progress()
    watchdog.close()
    assert timers[2:] == [allowed, allowed, None]
