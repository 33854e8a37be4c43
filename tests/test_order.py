import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.errors import UserError
from fastgpt.order import SAMPLINGS, SampleOrder


def assert_is_one_epoch(starts, num_tokens, context):
    starts = np.sort(starts)
    assert starts[0] in range(min(context, num_tokens - context))
    assert (np.diff(starts) == context).all()
    rest = num_tokens - 1 - (starts[-1] + context)
    assert 0 <= rest < context


def test_order_never_changes():
    def first(sampling, epoch):
        order = SampleOrder(1_000, context=10, seed=2**40 + 7, sampling=sampling)
        return order.take(epoch, 0, 5)[0].tolist()

    assert first("epoch", 0) == [254, 434, 924, 44, 884]
    assert first("epoch", 1) == [535, 135, 95, 885, 415]
    assert first("random-windows", 0) == [807, 525, 597, 803, 416]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_order_depends_on_seed_and_epoch(sampling):
    def sample(seed, epoch):
        order = SampleOrder(5_000, context=10, seed=seed, sampling=sampling)
        return tuple(order.take(epoch, 0, 50)[0])

    cases = [(0, 0), (0, 1), (1, 0), (2**32, 0), (-1, 0)]
    assert len({sample(*case) for case in cases}) == len(cases)
    assert sample(1, 2) == sample(1, 2)


@given(
    context=st.integers(1, 40), extra=st.integers(1, 300), seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1_000),
)  # fmt: skip
def test_epoch_holds_every_window_once(context, extra, seed, epoch):
    order = SampleOrder(context + extra, context=context, seed=seed, sampling="epoch")
    starts, *after = order.take(epoch, 0, order.epoch_size(epoch))
    assert after == [epoch + 1, 0]
    assert_is_one_epoch(starts, context + extra, context)


def test_every_token_is_reached_over_the_epochs():
    order = SampleOrder(53, context=8, seed=0, sampling="epoch")
    starts, *_ = order.take(0, 0, 6 * 100)
    reached = (starts[:, None] + np.arange(9)).ravel()
    assert set(reached) == set(range(53))


def test_random_windows_reach_every_start_and_repeat_some():
    order = SampleOrder(53, context=8, seed=0, sampling="random-windows")
    starts, *_ = order.take(0, 0, 1_000)
    assert set(starts) == set(range(45))
    one_epoch = order.take(5, 0, order.epoch_size(5))[0]
    assert len(one_epoch) in (5, 6)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_stream_is_the_same_however_it_is_cut(sampling, counts):
    order = SampleOrder(100, context=10, seed=1, sampling=sampling)
    whole, *end = order.take(0, 0, sum(counts))
    pieces, position = [], (0, 0)
    for count in counts:
        piece, *position = order.take(*position, count)
        pieces.append(piece)
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert position == end


@pytest.mark.parametrize("num_tokens", [0, 9, 10])
def test_corpus_shorter_than_a_window_is_refused(num_tokens):
    with pytest.raises(UserError, match=f"has {num_tokens} tokens.*context 10 needs 11"):
        SampleOrder(num_tokens, context=10, seed=0, sampling="epoch")
