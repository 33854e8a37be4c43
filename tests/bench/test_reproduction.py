"""The lecture's systems in short, and the command that trains all of them and writes the page."""

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import records, reproduce
from bench.reproduce import BEGIN, END, SYSTEMS, System, Target, put_into, render
from fastgpt.cli import configure
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train
from tests.warm import warm

# Validation loss after so many steps. B's is the published one; the others, of which nothing is
# published so early, are what runs have there that end where the published ones end.
EARLY = {
    "lecture-bigram": (300, 4.383),
    "lecture-head": (1000, 2.5303),
    "lecture-multihead": (300, 2.825),
    "lecture-feedforward": (300, 2.760),
    "lecture-residual": (300, 2.490),
    "lecture-layernorm": (300, 2.526),
    "lecture-gpt-small": (300, 2.416),
}
SLOW = ("lecture-residual", "lecture-layernorm")  # lecture-gpt-small has their parts, too


@pytest.mark.parametrize(
    "recipe", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in EARLY]
)
def test_each_system_is_on_its_way(recipe, shakespeare, one_thread):
    steps, expected = EARLY[recipe]
    run = build(
        resolve(configure([recipe, "--train.device", "cpu", "--data.eval-tokens", "32768"]))
    )
    with closing(run.loader):
        for _ in range(steps):
            train(run, run.step + 1)
    [(loss, targets)] = run.evaluate("val")
    assert targets == 32768
    assert loss == pytest.approx(expected, abs=0.05)


def test_every_system_is_a_recipe_that_reaches_and_evaluates_its_targets():
    for system in SYSTEMS:
        config = RECIPES[system.recipe][1]
        for target in system.targets:
            assert target.step <= config.steps
            every = config.eval_every if target.key == "val_loss" else config.log_every
            assert target.step % every == 0 or target.step == config.steps
    assert {s.letter for s in SYSTEMS} == {*"ABCDEFGH", "G'"}


# --- the command ----------------------------------------------------------------------------------

TARGETS = (
    Target(step=4, published=4.6, band=0.3),
    Target(step=4, published=9.0, key="train_loss", note="out of reach"),
    Target(step=400, published=1.0),
)
# The letter whose steps an option shortens, with the recipe that trains in a blink.
SHORT = System(letter="G", recipe="lecture-bigram", about="short", targets=TARGETS, seeds=(1, 2))
LEFT = System(letter="H", recipe="lecture-head", about="left", targets=TARGETS[:1], seeds=(1,))


@pytest.fixture
def command(shakespeare, tmp_path, monkeypatch):
    """Runs the command on two small systems, with the records and the page in `tmp_path`."""
    monkeypatch.setattr(reproduce, "SYSTEMS", (SHORT, LEFT))
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("FASTGPT_DATA", str(shakespeare.parent))
    page = tmp_path / "page.md"
    page.write_text(f"by hand\n{BEGIN}\nold\n{END}\nalso by hand\n")
    monkeypatch.setattr(reproduce, "PAGE", page)
    forks = SimpleNamespace(run=lambda command, cwd: warm().run(*command[1:], cwd=cwd))
    monkeypatch.setattr(reproduce, "subprocess", forks)

    def run(*flags: str) -> str:
        place = ["--runs", str(tmp_path / "runs"), "--device", "cpu"]
        reproduce.main([*place, "--gpt-steps", "4", *flags])
        folder = tmp_path if "--publish" in flags else tmp_path / "results" / "local"
        return (folder / "page.md").read_text()

    return run


def test_what_was_trained_is_recorded_and_not_trained_again(command, tmp_path, monkeypatch):
    page = command("--only", "lecture-bigram")
    assert page.startswith(f"by hand\n{BEGIN}\n")
    assert page.endswith(f"{END}\nalso by hand\n")
    [path] = (tmp_path / "results" / "local").glob("*/*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["config"]["seed"] for row in rows] == [1, 2]
    assert [row["config"]["steps"] for row in rows] == [4, 4]
    losses = [row["measured"]["val_loss 4"] for row in rows]
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| G")]
    assert lines[0][3] == f"{sum(losses) / 2:.4f} ({min(losses):.4f} to {max(losses):.4f})"
    assert lines[2][3:5] == ["4 steps run so far", "±0.05"]
    assert [cells[5] for cells in lines] == ["yes", "**no**", "-"]
    assert "| H: left | 4 | 4.6 | not run yet |" in page
    assert "1. out of reach" in page
    monkeypatch.setattr(reproduce, "train", None)
    assert command("--only", "G") == page
    with pytest.raises(TypeError, match="not callable"):  # it would train
        command("--only", "G", "--again")
    assert "old" in (tmp_path / "page.md").read_text()
    assert command("--only", "G", "--publish") == page
    assert [p.name for p in (tmp_path / "results").glob("*/*.jsonl")] == [path.name]
    assert not path.exists()


def test_of_several_seeds_the_mean_is_judged():
    said = "4.6000 (4.2000 to 5.0000)"
    assert reproduce._judged(TARGETS[0], [4.2, 5.0]) == (said, "yes")
    assert reproduce._judged(TARGETS[1], [4.2, 5.0]) == (said, "**no**")


def test_a_record_is_of_its_settings_whatever_the_device_and_the_options_since(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    config = configure(["lecture-head"])
    older = reproduce.settings(config)
    older["train"]["device"] = "cuda"
    del older["data"]["eval_tokens"], older["epochs"]  # one that the recipe sets, one it does not
    with (tmp_path / "x.jsonl").open("w") as file:
        for changes in ({}, {"eval_tokens": 51_200}, {"eval_tokens": 51_200, "no_more": 1}):
            row = {"kind": reproduce.NAME, "run": str(changes), "device": "a GPU"}
            row["config"] = {**older, "data": {**older["data"], **changes}}
            print(json.dumps(row), file=file)
    row = reproduce.on_record(config, reproduce.all_runs())
    assert row is not None
    assert row["run"] == "{'eval_tokens': 51200}"
    assert reproduce.on_record(config, reproduce.all_runs(), "a CPU") is None
    assert reproduce.on_record(replace(config, seed=1), reproduce.all_runs()) is None


def test_an_unknown_system_and_a_page_without_marks_are_named(command, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="unknown system 'Z'"):
        command("--only", "Z")
    (tmp_path / "page.md").write_text(f"only {END} and {BEGIN}")
    monkeypatch.setattr(reproduce, "train", None)  # it is seen before
    with pytest.raises(UserError, match="the page lacks the marks"):
        command()


def test_the_page_says_what_the_records_say(monkeypatch):
    monkeypatch.setattr(records, "LOCAL", "none")  # what this machine has measured since
    page = (reproduce.ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    rows = [row for row in records.read() if row["kind"] == reproduce.NAME]
    lengths = {row["config"]["steps"] for row in rows if row["system"] == "G"}
    lengths.add(reproduce.Reproduce().gpt_steps)
    found = [reproduce.recorded(reproduce.Reproduce(gpt_steps=steps)) for steps in lengths]
    assert page in [put_into(page, render(runs)) for runs in found]
    assert put_into(page, render({})).count("not run yet") == sum(len(s.targets) for s in SYSTEMS)
