"""The lecture's systems in short: each learns as far as runs do that end at the published loss."""

from contextlib import closing

import pytest

from fastgpt.cli import configure
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train

EARLY = {
    "lecture-bigram": (300, 4.383),
    "lecture-head": (300, 2.990),
    "lecture-multihead": (300, 2.825),
    "lecture-feedforward": (300, 2.760),
    "lecture-gpt-small": (50, 2.984),  # with the parts of lecture-residual and lecture-layernorm
}
"""Validation loss after so many steps: the bigram's is published, the others are of runs that end
at the published one."""


@pytest.mark.parametrize("recipe", EARLY)
def test_each_system_is_on_its_way(recipe, shakespeare, one_thread):
    steps, expected = EARLY[recipe]
    flags = ["--train.device", "cpu", "--data.eval-tokens", "32768"]
    run = build(resolve(configure([recipe, *flags])))
    with closing(run.loader):
        for _ in range(steps):
            train(run, run.step + 1)
    [(loss, targets)] = run.evaluate("val")
    assert targets == 32768
    assert loss == pytest.approx(expected, abs=0.05)
