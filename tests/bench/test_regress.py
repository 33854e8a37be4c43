"""`make bench-regress`: a baseline for each machine, and a failure if an op is 10 % slower."""

import pytest

from bench import regress
from bench.timing import Samples, Timer
from fastgpt.files import cache_dir


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command for one op whose rounds take these seconds, the fastest first or not."""
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path))

    def run(*flags: str, seconds: list[float]) -> int:
        monkeypatch.setattr(Timer, "interleave", lambda *_, **options: {"": Samples(seconds)})
        return regress.main(["--only", "add_layer_norm", *flags])

    return run


def test_slower_than_the_baseline_by_more_than_a_tenth_fails(command, capsys):
    assert command("--save", seconds=[0.3, 0.1, 0.2]) == 0
    assert command(seconds=[0.9, 0.109]) == 0
    assert "takes" not in capsys.readouterr().out
    assert command(seconds=[0.111, 0.9]) == 1
    printed = capsys.readouterr().out
    assert "add_layer_norm/" in printed
    assert "takes 1.11 times as long as in the baseline" in printed
    assert "no baseline" not in printed
    assert command("--save", seconds=[0.111]) == command(seconds=[0.111]) == 0


def test_without_a_baseline_nothing_is_compared_and_that_is_said(command, capsys):
    assert command(seconds=[0.1]) == 0
    assert "no baseline for" in capsys.readouterr().out


def test_baselines_of_devices_are_kept_apart():
    a, b = regress.baseline("NVIDIA H200"), regress.baseline("NVIDIA A100")
    assert a != b
    assert cache_dir() in a.parents
