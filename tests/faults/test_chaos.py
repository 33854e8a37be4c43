"""Kills at random moments lose nothing; the long form has 500."""

import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.faults import chaos
from tests.faults.chaos import Work, run_work
from tests.processes import ROOT, python


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    done = python("-m", "tests.faults.chaos", "--tries", len(chaos.WORKS), "--out", tmp_path / "x")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "x").read_text())
    assert [(found["tries"], found["faults"]) for found in record.values()] == [(1, [])] * 7


def slow():
    """Takes a second, and does again what was done before."""
    for _ in range(20):
        with Path("lines").open("a") as file:
            file.write("a line\n")
        time.sleep(0.05)


def leaves_a_process():
    if not os.fork():
        time.sleep(60)


def tried(start, place):
    work = Work(start=start, result=Path("lines").read_text, check=lambda: 0)
    return run_work(work, 2, place / "work", random.Random(0))["faults"]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (leaves_a_process, "exit status 0, 1 processes are left"),
        (lambda: {}["x"], "(?s)exit status 1, 0 processes are left: .*KeyError: 'x'"),
    ],
)
def test_each_kind_of_fault_is_seen(start, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos, "PATIENCE_S", 2.0)
    with pytest.raises(chaos.Fault, match=said):
        tried(start, tmp_path)


def test_another_result_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tried(slow, tmp_path) == ["Fault: the result is not that of the work without a kill"]


def test_the_page_has_the_table_of_the_record():
    record = json.loads(chaos.RECORD.read_text())
    assert sum(found["tries"] for found in record.values()) == 500
    assert chaos.table(record) in (ROOT / "docs" / "reliability.md").read_text()
