"""Kills at random moments lose nothing: one of each work; `make chaos` has 500."""

import json

import pytest

from tests.faults.chaos import WORKS
from tests.processes import python


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    done = python("-m", "tests.faults.chaos", "--tries", len(WORKS), "--out", tmp_path / "x")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "x").read_text())
    assert {name: (found["tries"], found["faults"]) for name, found in record.items()} == (
        dict.fromkeys(WORKS, (1, []))
    )
