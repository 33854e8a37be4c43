"""Damaged files are refused in one line, or loaded as they are; the long form has 10,000 cases."""

import json

import pytest

from fastgpt.errors import UserError
from tests.faults import hostile
from tests.processes import ROOT
from tests.warm import warm


def test_no_damaged_file_ends_in_a_traceback_or_takes_much_memory_or_time(tmp_path):
    out = tmp_path / "record.json"
    ended = warm().run("-m", "tests.faults.hostile", "--cases", 120, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = {said for *_, said, _ in json.loads(out.read_text())["counts"]}
    assert said == {"refused", "equal", "other content"}


def two_lines():
    raise UserError("a\nb")


@pytest.mark.parametrize(
    ("load", "said"),
    [(lambda: {}["x"], "KeyError: 'x'"), (two_lines, "no line"), (lambda: 2, "not noticed"),
     (lambda: [None for _ in iter(int, 1)], "TooSlow")],
)  # fmt: skip
def test_each_kind_of_fault_is_seen(load, said, monkeypatch):
    monkeypatch.setattr(hostile, "CPU_S", 0.2)
    found = hostile.outcome(load, "1", True)
    assert found.startswith("FAULT")
    assert said in found


def test_the_page_begins_with_the_table_of_the_record():
    record = json.loads(hostile.RECORD.read_text())
    assert record["cases"] == 10_000
    assert hostile.table(record) in (ROOT / "docs" / "reliability.md").read_text()
