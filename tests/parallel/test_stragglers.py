"""Ranks that are slow, or wait for data, are named after five log intervals."""

import torch

from fastgpt.parallel.stragglers import Pace

EVEN = torch.tensor([[0.4, 0.1], [0.5, 0.0], [0.3, 0.2], [0.5, 0.09]])


def test_a_rank_that_is_slow_for_five_log_intervals_is_named_once():
    pace, slow = Pace(), EVEN.clone()
    slow[2] = torch.tensor([0.35, 0.35])
    warned = [pace.compare(times)[1] for times in (*[slow] * 4, EVEN, *[slow] * 6)]
    assert [len(lines) for lines in warned] == [0] * 9 + [1, 0]
    assert "rank 2 " in warned[9][0]
    assert "0.35 s and waiting for data 0.35 s, together 1.3 times" in warned[9][0]


def test_the_record_has_the_spread_over_ranks():
    assert Pace().compare(EVEN)[0] == {
        "forward_s": [0.3, 0.45, 0.5], "data_wait_s": [0.0, 0.095, 0.2], "slowest_rank": 3,
    }  # fmt: skip
