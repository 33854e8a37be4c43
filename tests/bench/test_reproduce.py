"""The command that trains the lecture's systems, records their losses and writes the page."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import records, report, reproduce
from bench.reproduce import System, Target
from fastgpt import cli
from fastgpt.cli import configure
from fastgpt.config.config import to_json
from fastgpt.errors import UserError


def test_what_was_trained_is_recorded_and_not_trained_again(
    shakespeare, tmp_path, monkeypatch, no_curves
):
    targets = (Target(4, 4.6, 0.3), Target(4, 9.0, key="train_loss"), Target(9, 1.0))
    short = System("G", "lecture-bigram", "short", targets, seeds=(1, 2))
    here = SimpleNamespace(
        run=lambda command, cwd: SimpleNamespace(returncode=cli.main(command[2:]))
    )
    typed, runs = tmp_path / "page.md", tmp_path / "runs"
    given = {"SYSTEMS": (short,), "subprocess": here, "PAGE": typed, "RUNS": runs}
    for name, value in given.items():
        monkeypatch.setattr(reproduce, name, value)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "write_page", lambda: None)
    typed.write_text("typed\n<!-- from the records -->\nold\n<!-- to here -->\n")

    def run(steps: int, *flags: str) -> str:
        reproduce.main(["--device", "cpu", "--gpt-steps", str(steps), "--only", "G", *flags])
        return (tmp_path / "local" / "page.md").read_text()

    page, rows = run(4), records.read(tmp_path / "local")
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| G")]
    assert [cells[5] for cells in lines] == ["yes", "**no**", "-"]
    assert lines[2][3] == "4 steps run so far"
    monkeypatch.setattr(reproduce, "train", None)
    assert run(3) == page  # a part of the longer run
    with pytest.raises(TypeError, match="not callable"):  # it would train
        run(5)
    run(4, "--render", "--publish")
    assert (typed.read_text(), records.read()) == (page, rows)
    typed.write_text("no marks")
    with pytest.raises(UserError, match="lacks the marks"):  # before anything is trained
        run(5)


def test_of_several_seeds_the_mean_is_judged():
    rows = [{"measured": {"val_loss 4": x}} for x in (4.2, 5.0)]
    judged = [reproduce.judged(Target(4, published), rows) for published in (4.6, 4.2)]
    assert judged == [("4.6000 (4.2000 to 5.0000)", "±0.05", said) for said in ("yes", "**no**")]


def test_a_record_outlives_options_and_devices(monkeypatch):
    config = configure(["lecture-head"])
    older = json.loads(to_json(config))
    older["train"]["device"] = "cuda"
    del older["data"]["eval_tokens"], older["epochs"]  # one that the recipe sets, one it does not
    row = {"case": "reproduce/lecture-head/steps=1/seed=1", "run": "", "config": older}
    monkeypatch.setattr(records, "read", lambda *folder: [] if folder else [row])
    for changes, known in (({}, []), ({"eval_tokens": 51_200}, [row]), ({"no_more": 1}, [])):
        older["data"] |= changes
        assert reproduce.on_record(config) == known
        assert not reproduce.on_record(replace(config, seed=1))
