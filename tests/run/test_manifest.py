"""Tests of what a run's manifest decides when the run is resumed."""

import json
from dataclasses import replace

import pytest

from fastgpt.config.config import Config
from fastgpt.run.manifest import precision_asked

BEGUN = {"on": "cpu", "precision": "bf16"}


@pytest.mark.parametrize(
    ("asked", "on", "begun", "expected"),
    [
        ("auto", "cpu", BEGUN, "bf16"),
        ("fp32", "cpu", BEGUN, "fp32"),
        ("auto", "cuda", BEGUN, "auto"),
        ("auto", "cpu", BEGUN | {"on": "cuda"}, "auto"),
        ("auto", "cpu", BEGUN | {"precision": "other"}, "auto"),
        ("auto", "cpu", {"precision": "bf16"}, "auto"),
        ("auto", "cpu", [], "auto"),
    ],
)
def test_a_run_on_cpus_keeps_its_precision(tmp_path, asked, on, begun, expected):
    assert precision_asked(Config(resume=str(tmp_path)), on, print) == "auto"  # no manifest
    (tmp_path / "manifest.json").write_text(json.dumps(begun))
    config = Config()
    config = replace(config, train=replace(config.train, precision=asked))
    assert precision_asked(config, on, print) == asked  # a new run
    for resumed in (tmp_path, tmp_path / "checkpoints" / "step_7"):
        assert precision_asked(replace(config, resume=str(resumed)), on, print) == expected
