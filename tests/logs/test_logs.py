"""Logs on a full or broken disk never stop training, nor does a clock that jumps."""

import itertools
import sys
import time
from contextlib import suppress

from fastgpt.logs.metrics import MetricsLog, read_records
from tests.runs import before_each, outcome, series


def test_lines_after_a_torn_one_are_kept(tmp_path):
    log = MetricsLog(tmp_path, 0, "title", (said := []).append)
    log.write({"step": 1, "tokens": 1})
    with open(log.path, "a") as file:
        file.write('{"step"')  # as a full disk leaves it
    log.lost = 1
    log.write({"step": 3, "tokens": 1})
    log.close()
    assert [record["step"] for record in read_records(log.path)] == [1, 3]
    assert said[-1].endswith("1 write to them failed")


def test_records_go_on_in_a_new_file_if_the_old_one_is_removed_or_replaced(
    fit, tmp_path, monkeypatch
):
    path = tmp_path / "run" / "metrics.jsonl"

    def damage(_, record):
        if record["step"] == 3:
            path.unlink()
        if record["step"] == 6:
            path.rename(f"{path}~")
            path.touch()

    before_each(monkeypatch, MetricsLog, "write", damage)
    fit("--eval-every 0")
    assert set(series(tmp_path / "run", "train_loss")) == {6, 7, 8}


def test_neither_output_to_a_full_disk_nor_a_clock_that_jumps_changes_a_run(
    fit, tmp_path, monkeypatch
):
    expected = outcome(fit(f"--run-dir {tmp_path / 'even'}"))
    jumps = itertools.cycle([1e9, 0.0, 4e9, 2e9])  # of the wall's clock, not the machine's
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        run = fit()
    assert outcome(run) == expected
    for key in ("tok_per_s", "mfu", "data_wait"):
        assert all(value >= 0 for value in series(run, key).values())
