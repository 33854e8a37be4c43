"""Sequences that ranks share: which tokens are whose.

That the losses are those of one rank is shown in test_topologies.
"""

import torch

from fastgpt.data.items import IGNORED
from fastgpt.model.context_split import ContextShard


def split(rank, size):
    return ContextShard(rank, size, None)  # pyright: ignore[reportArgumentType] - nothing is exchanged


def test_each_token_has_one_rank_and_work_is_even():
    own = [split(rank, 4).positions(32, torch.device("cpu")) for rank in range(4)]
    assert own[1].tolist() == [4, 5, 6, 7, 24, 25, 26, 27]
    assert torch.cat(own).sort().values.tolist() == list(range(32))
    assert len({int(positions.sum()) for positions in own}) == 1  # pairs of tokens it compares


def test_rank_without_targets_adds_nothing():
    targets = torch.tensor([[3, 1] + [IGNORED] * 6])
    part = split(1, 2)
    own, weight = part.targets(targets, part.positions(8, torch.device("cpu")))
    assert weight == 0
    assert (own != IGNORED).all()  # a mean over none would be NaN
