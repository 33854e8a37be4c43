"""Evaluation of a held-out split: every target is scored once, by any number of ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpt.data.loader import IGNORED, eval_batches, random_batches
from fastgpt.data.order import SampleOrder
from fastgpt.errors import UserError
from tests.data.test_loader import EOT, of_texts, padded

ranks = st.integers(1, 4)
rows = st.integers(1, 5)


def batches(tokens, world_size=1, make=eval_batches, **options):
    """Collects the batches of all ranks, one rank after the other."""
    own = {"context": 10, "micro_batch": 1, "max_tokens": 0} if make is eval_batches else {}
    return [
        pair
        for rank in range(world_size)
        for pair in make(tokens, rank=rank, world_size=world_size, **own | options)
    ]


def scored(num_tokens, *, context=10, micro_batch=3, **options):
    """Returns the sorted positions of the targets that all ranks together score."""
    found, tokens = [], np.arange(num_tokens, dtype=np.uint16)
    for x, y in batches(tokens, context=context, micro_batch=micro_batch, **options):
        assert x.shape == y.shape == (micro_batch, context)
        assert x.dtype == y.dtype == torch.int64
        counted = y != -100
        assert counted.any()
        assert torch.equal(y[counted], x[counted] + 1)
        found += y[counted].tolist()
    return sorted(found)


@settings(max_examples=60)
@given(num_tokens=st.integers(2, 400), context=st.integers(1, 50), micro_batch=rows, ranks=ranks)
def test_all_windows_score_every_target_once(num_tokens, context, micro_batch, ranks):
    got = scored(num_tokens, context=context, micro_batch=micro_batch, world_size=ranks)
    assert got == list(range(1, num_tokens))


@settings(max_examples=60)
@given(max_tokens=st.integers(1, 1_000), ranks=ranks)
def test_part_of_the_windows_is_spread_and_the_same_for_all_ranks(max_tokens, ranks):
    got = scored(605, world_size=ranks, max_tokens=max_tokens)
    assert got == scored(605, max_tokens=max_tokens)
    assert len(got) == len(set(got))
    if max_tokens < 604:
        assert len(got) <= max(10, max_tokens)
        assert len(got) > max_tokens - 20
        windows = np.unique((np.array(got) - 1) // 10)
        assert np.ptp(np.diff(windows, append=61)) <= 1
    else:
        assert got == list(range(1, 605))


def test_last_window_keeps_its_context():
    *_, (x, y) = batches(np.arange(26), context=10)
    assert x.tolist() == [list(range(15, 25))]
    assert y.tolist() == [[-100] * 5 + list(range(21, 26))]


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_split_without_a_target_is_refused_at_once(num_tokens):
    with pytest.raises(UserError, match=f"at least 2 tokens, but has {num_tokens}"):
        batches(np.arange(num_tokens), context=1)


# --- documents ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=20), context=st.integers(1, 25),
    micro_batch=rows, ranks=ranks,
)  # fmt: skip
def test_each_document_is_scored_once_up_to_its_cut(lengths, context, micro_batch, ranks):
    texts = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    tokens, order = of_texts(texts, context=context)
    options = {"context": context, "micro_batch": micro_batch, "documents": order, "pad_id": EOT}
    found = [
        row for x, y in batches(tokens, ranks, **options) for row in zip(x.tolist(), y.tolist())
    ]
    scored = [(a, b) for a, b in found if b != [IGNORED] * context]
    assert sorted(scored) == sorted(padded(text, context) for text in texts)


def test_budget_counts_the_targets_that_are_scored():
    """The evaluation budget counts scored targets: 10 of a document's 100 in a context of 10."""
    starts = np.arange(0, 4000, 100)
    order = SampleOrder(4000, context=10, seed=0, align="document", documents=starts)
    found = batches(np.zeros(4000, np.uint16), context=10, max_tokens=200, documents=order)
    assert sum(int((y != IGNORED).sum()) for _, y in found) == 200


# --- random windows -------------------------------------------------------------------------------


def drawn(*, seed=(3, 0, 0), world_size=1, size=100):
    """Draws 12 random windows of 5 tokens in batches of 2, over all ranks: x and y (12, 5)."""
    options = {"context": 5, "micro_batch": 2, "samples": 12, "seed": seed}
    xs, ys = zip(*batches(np.arange(size), world_size, random_batches, **options))
    return torch.cat(xs), torch.cat(ys)


def test_random_windows_are_windows_and_a_function_of_their_seed():
    x, y = drawn()
    assert x.shape == y.shape == (12, 5)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(5))
    assert len(set(x[:, 0].tolist())) > 6
    assert torch.equal(x, drawn()[0])
    assert sorted(x.tolist()) == sorted(drawn(world_size=3)[0].tolist())
    for seed in ((3, 1, 0), (3, 0, 1), (4, 0, 0)):  # another step, split or run
        assert not torch.equal(x, drawn(seed=seed)[0])
    assert drawn(size=6)[1].max() == 5  # the only window there is ends with the last token
    with pytest.raises(UserError, match="has 5 tokens, but one window of context 5 needs 6"):
        drawn(size=5)
