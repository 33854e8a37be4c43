import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.config.config import OptimConfig
from fastgpt.train.optim import lr_ratio

SHAPES = {
    "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
    "linear": lambda x: 1 - x,
    "wsd": lambda x: min(1.0, (1 - x) / 0.25),  # a fifth of 100 steps, of which 20 are warmup
    "constant": lambda x: 1.0,
}
"""Factor between the smallest ratio (0) and the peak (1) after a share x of the decay."""


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("low", [0.0, 0.2])
def test_an_even_rise_to_the_peak_and_then_the_schedules_own_shape(schedule, low):
    steps, warmup = 100, 20
    config = OptimConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=low)
    ratios = [lr_ratio(step, steps, config) for step in (*range(steps), 5 * steps)]
    assert ratios[:warmup] == pytest.approx([n / warmup for n in range(1, warmup + 1)])
    assert ratios[warmup] == 1.0  # the first step after the warmup is still at the peak
    low = 1.0 if schedule == "constant" else low
    shape = [SHAPES[schedule](n / 80) for n in (*range(80), 80)]
    assert ratios[warmup:] == pytest.approx([low + (1 - low) * y for y in shape])


def test_wsd_whose_fall_reaches_into_the_warmup_starts_it_after():
    config = OptimConfig(schedule="wsd", warmup_steps=90, min_lr_ratio=0.0)
    ratios = [lr_ratio(step, 100, config) for step in range(89, 100)]
    assert ratios == pytest.approx([1.0, *(1 - n / 10 for n in range(10))])


@given(
    schedule=st.sampled_from(list(SHAPES)), steps=st.integers(1, 500), warmup=st.integers(0, 600),
    low=st.floats(0, 1), step=st.integers(0, 1000),
)  # fmt: skip
def test_stays_in_bounds_and_never_rises_after_the_warmup(schedule, steps, warmup, low, step):
    config = OptimConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=low)
    here, after = (lr_ratio(n, steps, config) for n in (step, step + 1))
    assert 0 <= here <= 1
    assert here == lr_ratio(step, steps, config)
    if step < steps:
        assert here > 0
    if step < warmup - 1:
        assert here < after
    else:
        assert low <= here + 1e-12
        assert after <= here
