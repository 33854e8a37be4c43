import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.config import OptimConfig
from fastgpt.schedule import lr_ratio

SCHEDULES = ("cosine", "wsd", "linear", "constant")
FALLING = ("cosine", "wsd", "linear")


def ratios(steps: int, **options) -> list[float]:
    config = OptimConfig(**options)
    return [lr_ratio(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_evenly_to_the_peak(schedule):
    values = ratios(100, schedule=schedule, warmup_steps=10)
    assert values[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert values[9] == values[10] == 1.0  # the first step after the warmup is still at the peak
    assert ratios(100, schedule=schedule)[0] == 1.0


@pytest.mark.parametrize("schedule", FALLING)
def test_ends_at_the_smallest_ratio(schedule):
    config = OptimConfig(schedule=schedule, min_lr_ratio=0.2, warmup_steps=10)
    assert lr_ratio(1000, 1000, config) == pytest.approx(0.2)
    # the last update still moves: one stride of the fall above the end
    assert 0.2 < lr_ratio(999, 1000, config) < 0.205
    assert lr_ratio(5000, 1000, config) == pytest.approx(0.2)


def test_linear_is_halfway_down_in_the_middle():
    values = ratios(110, schedule="linear", warmup_steps=10, min_lr_ratio=0.2)
    assert values[60] == pytest.approx(0.6)


def test_cosine_follows_the_formula():
    values = ratios(110, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    for n in (0, 25, 50, 75, 99):
        expected = 0.1 + 0.9 * math.cos(math.pi * n / 200) ** 2
        assert values[10 + n] == pytest.approx(expected)


def test_wsd_holds_and_then_falls_linearly():
    values = ratios(100, schedule="wsd", warmup_steps=10, decay_fraction=0.25, min_lr_ratio=0.0)
    assert values[10:76] == [1.0] * 66
    assert values[75:] == pytest.approx([1 - n / 25 for n in range(25)])


def test_wsd_whose_fall_reaches_into_the_warmup_starts_it_after():
    values = ratios(20, schedule="wsd", warmup_steps=10, decay_fraction=0.9, min_lr_ratio=0.0)
    assert values[9:] == pytest.approx([1.0, *(1 - n / 10 for n in range(10))])


def test_constant_stays_whatever_the_smallest_ratio():
    assert ratios(50, schedule="constant", min_lr_ratio=0.0, warmup_steps=5)[4:] == [1.0] * 46


@given(
    schedule=st.sampled_from(SCHEDULES), steps=st.integers(1, 500), warmup=st.integers(0, 600),
    low=st.floats(0, 1), decay=st.floats(0, 1, exclude_min=True), step=st.integers(0, 1000),
)  # fmt: skip
def test_stays_in_bounds_and_never_rises_after_the_warmup(
    schedule, steps, warmup, low, decay, step
):
    config = OptimConfig(
        schedule=schedule, warmup_steps=warmup, min_lr_ratio=low, decay_fraction=decay
    )
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
