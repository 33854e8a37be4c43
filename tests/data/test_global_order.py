"""Order of samples: equal for any number of ranks, any accumulation, and after a resume."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpt.data.loader import IGNORED, Loader
from fastgpt.data.order import Mixture, SampleOrder
from tests.data.sets import ALIGNMENTS, SAMPLINGS


@st.composite
def mixtures(draw):
    """Returns a function that builds a mixture of corpora from a saved state, and their tokens."""
    context = draw(st.integers(1, 20))
    align, sampling = draw(st.sampled_from(ALIGNMENTS)), draw(st.sampled_from(SAMPLINGS))
    corpora, settings = [], []
    for number in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=20))
        *documents, total = np.cumsum([0, *lengths, 22]).tolist()
        # 22 tokens at the end: a window fits whatever the context
        corpora.append(np.arange(total) + 10_000 * number)
        settings.append({"seed": draw(st.integers(0, 99)), "documents": np.array(documents)})
    weights = [draw(st.floats(0.01, 1)) for _ in corpora]

    def make(state=None):
        orders = [
            SampleOrder(len(c), context=context, sampling=sampling, align=align, **kwargs)
            for c, kwargs in zip(corpora, settings)
        ]
        return Mixture(orders, weights, state)

    return make, corpora, context


def read(case, steps, *, world_size, accumulation, rows=None, size=None, state=None):
    """Reads x and y of all ranks in the documented order: (steps, global batch, 2 T).

    Also returns the state after each step, with the shares (steps, micro-steps, ranks).
    """
    make, corpora, context = case
    size = size or world_size * accumulation * rows
    rows = size // (world_size * accumulation)
    parts, states, shares = [], [], []
    for rank in range(world_size):
        with Loader(
            corpora, make(state), context=context, global_batch=size, micro_batch=rows, rank=rank,
            world_size=world_size, pad_id=999,
        ) as loader:  # fmt: skip
            assert loader.accumulation == accumulation
            for _ in range(steps):
                for _ in range(accumulation):
                    parts.append(torch.cat(loader.next(), 1).numpy())
                    shares.append(loader.target_ratio)
                states.append(loader.state())
    grid = (world_size, steps, accumulation, rows, 2 * context)
    batches = np.stack(parts).reshape(grid).transpose(1, 2, 0, 3, 4)
    assert states == states[:steps] * world_size, "every rank saves the same state"
    shares = np.reshape(shares, grid[:3]).transpose(1, 2, 0)
    return batches.reshape(steps, size, 2 * context), states[:steps], shares


@settings(max_examples=15, deadline=None)  # 15 loaders in each
@given(case=mixtures(), data=st.data())
def test_global_batches_are_the_same_for_any_ranks_accumulation_and_resume(case, data):
    """Global batches are the same for 1 to 8 ranks, any accumulation, and after a resume.

    There are 6 steps of 24 samples each, more than some of these epochs have.
    """
    expected, states, _ = read(case, 6, world_size=1, accumulation=1, size=24)
    for world_size in (1, 2, 3, 8):
        splits = [n for n in (1, 2, 3, 4, 6, 8, 12, 24) if 24 % (world_size * n) == 0]
        accumulation, step = data.draw(st.sampled_from(splits)), data.draw(st.integers(0, 5))
        how = {"world_size": world_size, "accumulation": accumulation, "size": 24}
        state = states[step - 1] if step else None
        got, states_after, _ = read(case, 6 - step, **how, state=state)
        np.testing.assert_array_equal(got, expected[step:])
        assert states_after == states[step:]


@settings(max_examples=40)
@given(
    case=mixtures(), world_size=st.integers(1, 3), accumulation=st.integers(1, 3),
    rows=st.integers(1, 4),
)  # fmt: skip
def test_global_batches_follow_the_stream_and_shares_weigh_targets_alike(
    case, world_size, accumulation, rows
):
    """Ranks read the documented stream of samples, and weigh each target alike.

    A step adds up means of micro-batches, times their shares, and averages over the ranks.
    """
    make, corpora, context = case
    got, _, shares = read(case, 3, world_size=world_size, accumulation=accumulation, rows=rows)
    samples = make().take(3 * rows * world_size * accumulation).tolist()
    first = [int(corpora[number][start]) for number, start, _ in samples]
    assert got[:, :, 0].ravel().tolist() == first
    lengths = [stop - start - 1 for _, start, stop in samples]
    assert (got[:, :, context:] != IGNORED).sum(-1).ravel().tolist() == lengths

    y = got[:, :, context:].reshape(3, accumulation, world_size, -1)
    losses = np.ma.array(np.sin(y), mask=y == IGNORED)  # any loss that the target decides
    means = losses.mean(-1).filled(np.nan)
    for step in range(3):
        mean = (means[step] * shares[step]).mean()
        assert mean == pytest.approx(losses[step].mean(), rel=1e-12, abs=1e-12)
