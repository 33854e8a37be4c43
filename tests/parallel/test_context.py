"""Sequences that ranks share: which tokens are whose, and what is refused.

That the losses are those of one rank is shown in test_topologies.
"""

import pytest
import torch

from fastgpt.cli import parse
from fastgpt.data.items import IGNORED
from fastgpt.errors import UserError
from fastgpt.model.context_split import ContextShard
from fastgpt.parallel.context import split_context
from fastgpt.parallel.distributed import World
from fastgpt.parallel.mesh import non_dp_size

WORLD = World(size=4, non_dp_size=2)


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model.context 18 --train.batch-tokens 144", r"model.context .* multiple of 4, not 18"),
        ("--train.eval-tasks lambada=x", "expected model.architecture gpt, and no --train.eval-ta"),
        ("--model.architecture residual --model.activation relu", "expected model.architecture gp"),
    ],
)
def test_what_does_not_go_with_it_is_refused(flags, said, tiny):
    with pytest.raises(UserError, match=rf"^--parallel.cp is 2: .*{said}"):
        split_context(parse(tiny("--parallel.cp 2", flags)), None)


def test_ranks_that_do_not_divide_are_refused(tiny):
    config = parse(tiny("--parallel.cp 3")).parallel
    assert non_dp_size(config, World(size=6)) == 3
    with pytest.raises(
        UserError, match=r"cp x --parallel.tp is 3: expected a divisor of .* ranks, 4$"
    ):
        non_dp_size(config, WORLD)
