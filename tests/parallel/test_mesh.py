"""Arrangements of ranks: who holds the model together, who has which tokens, what is refused."""

from dataclasses import replace

import pytest
import torch

from fastgpt.cli import configure
from fastgpt.config.config import ParallelConfig
from fastgpt.data.items import IGNORED
from fastgpt.errors import UserError
from fastgpt.model.context_split import ContextShard
from fastgpt.parallel.distributed import World
from fastgpt.parallel.parallelize import check_combination, group_size, model_parallel_size
from fastgpt.train.plan import largest_micro_batch

FSDP, HSDP = "--parallel.kind fsdp", "--parallel.kind hsdp"
CP, TP = "--parallel.cp 2", f"{FSDP} --parallel.tp 2"


@pytest.mark.parametrize(
    ("settings", "group", "same_data"),
    [
        ({}, 8, 1),
        ({"kind": "hsdp", "tp": 2, "cp": 2, "shards": 4}, 4, 4),
    ],
)
def test_ranks_that_hold_the_model_together_or_read_the_same_data(settings, group, same_data):
    config, world = ParallelConfig(**settings), World(size=8)
    assert (group_size(config, world), model_parallel_size(config, world)) == (group, same_data)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train.batch-tokens 48", "expected a multiple of the 8 data-parallel ranks"),
        ("--parallel.cp 3", "x --parallel.tp is 3: expected a divisor of the number of ranks, 8"),
        (f"{CP} --model.context 18 --train.batch-tokens 144", "multiple of 4, not 18"),
        (f"{CP} --model.architecture residual --model.activation relu", "model.architecture gpt, "),
        (f"{FSDP} --parallel.shards 2", "--parallel.shards is 2: expected None, because"),
        (f"{HSDP} --parallel.shards 3", "groups of 3 ranks: expected a divisor of the number"),
        (f"{HSDP} {CP} --parallel.tp 2 --parallel.shards 2", "of 2 ranks: expected a multiple of"),
        (f"{FSDP} --parallel.dtype bf16", "--parallel.dtype is bf16: expected --train.precision"),
        (f"{FSDP} --train.precision fp16", "kind is fsdp: expected --train.precision bf16"),
        ("--parallel.tp 2", "--parallel.tp is 2: expected --parallel.kind fsdp or"),
        (f"{TP} --model.dropout 0.1", "expected --model.dropout-places without attention"),
        (f"{TP} --ops.loss chunked", "expected --ops.loss auto or torch, not chunked"),
        (f"{TP} --model.num-kv-heads 1", "--model.num-kv-heads to be a multiple of it, not 1"),
        (f"{TP} --model.vocab-multiple 257", "vocab-multiple, to be a multiple of it, not 257"),
        (f"{TP} --model.architecture residual", "expected --model.architecture gpt, not residual"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(flags, said, tiny):
    with pytest.raises(UserError) as error:
        check_on_8_ranks(configure(tiny(flags)))
    assert said in str(error.value)


def check_on_8_ranks(config):
    """Makes all checks of a run's settings."""
    config = replace(config, model=replace(config.model, vocab_size=256))
    group_size(config.parallel, World(size=8))
    size = model_parallel_size(config.parallel, World(size=8))
    largest_micro_batch(config, World(size=8, model_parallel_size=size), print)
    check_combination(config, config.train.precision)


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
