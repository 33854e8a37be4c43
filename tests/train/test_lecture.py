"""The lecture's systems in short: each learns as far as runs do that end at the published loss."""

from contextlib import closing

import pytest

from fastgpt.cli import configure
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train

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
