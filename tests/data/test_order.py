"""Samples of an epoch and their order, for one corpus and for a mixture."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.data.order import Mixture, SampleOrder
from fastgpt.errors import UserError
from tests.data.sets import ALIGNMENTS, SAMPLINGS

# 40 documents of 3 to 42 tokens: some shorter than a window of 11, some longer
DOCUMENTS = np.cumsum([0, *(3 + 7 * i % 40 for i in range(39))])
NUM_TOKENS = int(DOCUMENTS[-1]) + 15

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=30)
"""Lengths of the documents of a corpus."""


def order_of(align="none", sampling="epoch", seed=1, context=10):
    return SampleOrder(
        NUM_TOKENS, context=context, seed=seed, sampling=sampling, align=align, documents=DOCUMENTS
    )


def whole_epoch(order, epoch=0):
    starts, *after = order.take(epoch, 0, order.epoch_size(epoch))
    assert after == [epoch + 1, 0]
    return starts


# --- any alignment --------------------------------------------------------------------------------


PINNED = {
    ("none", "epoch"): [685, 765, 565, 585, 845],
    ("none", "random-windows"): [642, 22, 89, 654, 598],
    ("bos", "epoch"): [864, 279, 140, 835, 258],
    ("bos", "random-windows"): [578, 430, 668, 128, 258],
    ("document", "epoch"): [140, 414, 649, 128, 405],
    ("document", "random-windows"): [265, 453, 13, 483, 535],
}


@pytest.mark.parametrize(("align", "sampling"), PINNED)
def test_order_never_changes(align, sampling):
    starts = order_of(align, sampling, seed=2**40 + 7).take(1, 0, 5)[0]
    assert starts.tolist() == PINNED[align, sampling]


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_order_depends_on_seed_and_epoch(sampling, align):
    def sample(seed, epoch):
        return tuple(order_of(align, sampling, seed).take(epoch, 0, 20)[0])

    cases = [(0, 0), (0, 1), (1, 0), (2**32, 0), (-1, 0)]
    assert len({sample(*case) for case in cases}) == len(cases)
    assert sample(1, 2) == sample(1, 2)


@pytest.mark.parametrize("align", ALIGNMENTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_stream_is_the_same_however_it_is_cut(sampling, align, counts):
    order = order_of(align, sampling)
    whole, *end = order.take(0, 0, sum(counts))
    chunks, position = [], (0, 0)
    for count in counts:
        chunk, *position = order.take(*position, count)
        chunks.append(chunk)
    assert np.concatenate(chunks).tolist() == whole.tolist()
    assert position == end


@pytest.mark.parametrize("num_tokens", [0, 9, 10])
def test_corpus_without_a_window_is_named(num_tokens):
    with pytest.raises(UserError, match=f"has {num_tokens} tokens.*context 10 needs 11"):
        SampleOrder(num_tokens, context=10, seed=0)


# --- windows anywhere -----------------------------------------------------------------------------


@given(
    context=st.integers(1, 40), extra=st.integers(1, 300), seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1_000),
)  # fmt: skip
def test_epoch_holds_every_window_once(context, extra, seed, epoch):
    order = SampleOrder(context + extra, context=context, seed=seed, sampling="epoch")
    starts = whole_epoch(order, epoch)
    assert min(starts) in range(min(context, extra))
    assert (np.diff(np.sort(starts)) == context).all()
    assert 0 <= extra - 1 - max(starts) < context
    assert (order.stops(starts) - starts == context + 1).all()


@pytest.mark.parametrize(
    ("align", "expected"),
    [
        ("none", range(NUM_TOKENS - 10)),
        ("bos", [start for start in DOCUMENTS if start + 10 < NUM_TOKENS]),
        ("document", DOCUMENTS),
    ],
)
def test_random_samples_reach_every_start_and_repeat_some(align, expected):
    order = order_of(align, "random-windows")
    assert len(set(whole_epoch(order))) < len(whole_epoch(order))
    assert len(whole_epoch(order)) == len(whole_epoch(order_of(align)))
    assert set(order.take(0, 0, 20_000)[0]) == set(expected)


# --- windows that begin with documents ------------------------------------------------------------


@given(lengths=lengths, context=st.integers(1, 40), epoch=st.integers(0, 5))
def test_bos_windows_begin_with_documents_and_leave_out_one_at_most(lengths, context, epoch):
    *documents, num_tokens = accumulate(lengths, initial=0)
    fitting = [start for start in documents if start + context < num_tokens]
    given = {"context": context, "align": "bos", "documents": np.array(documents)}
    if not fitting:
        with pytest.raises(UserError, match="corpus"):
            SampleOrder(num_tokens, seed=0, **given)
        return
    order = SampleOrder(num_tokens, seed=0, **given)
    shuffled = whole_epoch(order, epoch)
    assert (order.stops(shuffled) - shuffled == context + 1).all()
    starts = sorted(shuffled.tolist())
    # the first is a document that begins in what the window at the very first one would read
    assert starts[0] in fitting
    assert starts[0] < max(context, 1)
    # each after it is one of the next two documents that begin where the one before has ended
    for start, following in pairwise([*starts, None]):
        assert following in [*(s for s in fitting if s >= start + context), None, None][:2]


def test_bos_epochs_cut_different_documents():
    documents = np.cumsum(np.random.default_rng(0).integers(2, 60, 2_000))
    given = {"context": 64, "seed": 0, "align": "bos", "documents": documents}
    order = SampleOrder(int(documents[-1]) + 60, **given)
    first, second = (set(whole_epoch(order, epoch).tolist()) for epoch in (0, 1))
    assert 0.4 < len(first & second) / len(first) < 0.9


# --- documents ------------------------------------------------------------------------------------


@given(lengths=lengths, context=st.integers(1, 40), epoch=st.integers(0, 5))
def test_document_samples_are_each_document_once_and_its_end(lengths, context, epoch):
    *documents, num_tokens = accumulate(lengths, initial=0)
    order = SampleOrder(
        num_tokens, context=context, seed=0, align="document", documents=np.array(documents)
    )
    starts = whole_epoch(order, epoch)
    assert sorted(starts.tolist()) == documents
    ends = {start: start + length + 1 for start, length in zip(documents, lengths)}
    expected = [min(ends[start], start + context + 1) for start in starts.tolist()]
    assert order.stops(starts).tolist() == expected


# --- mixtures -------------------------------------------------------------------------------------

weights = st.lists(st.floats(0.001, 1), min_size=1, max_size=5)


def mixed(weights, state=None, align="none"):
    """Mixes one corpus for each weight, each in an order of its own."""
    orders = [order_of(align, seed=seed) for seed in range(len(weights))]
    return Mixture(orders, weights, state)


@given(weights=weights, scale=st.floats(0.01, 100))
def test_every_count_stays_within_a_few_of_its_share(weights, scale):
    """By chance alone, counts would be off by 50 and more."""
    corpora = mixed([weight * scale for weight in weights]).take(3_000)[:, 0]
    numbers = np.arange(1, 3_001)
    for corpus, weight in enumerate(weights):
        count = (corpora == corpus).cumsum()
        assert np.abs(count - numbers * weight / sum(weights)).max() < 6


@pytest.mark.parametrize("align", ALIGNMENTS)
@given(weights=weights)
def test_each_corpus_is_read_in_its_own_order(align, weights):
    samples = mixed(weights, align=align).take(300)
    for seed in range(len(weights)):
        corpus, starts, stops = samples[samples[:, 0] == seed].T
        order = order_of(align, seed=seed)
        assert starts.tolist() == order.take(0, 0, len(corpus))[0].tolist()
        assert stops.tolist() == order.stops(starts).tolist()


@given(weights=weights, counts=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_mixture_goes_on_from_any_state(weights, counts):
    whole, chunks, state = mixed(weights), [], None
    expected = whole.take(sum(counts))
    for count in counts:
        mixture = mixed(weights, state)
        chunks.append(mixture.take(count))
        state = mixture.state()
    np.testing.assert_array_equal(np.concatenate(chunks), expected)
    assert state == whole.state()
    assert state["sample"] == [sum(counts)]


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"sample": [0], "epoch": [0], "index": [0]}, "corpora in the loader state: 1, expected 2"),
        ({"sample": [9], "epoch": [0, -1], "index": [0, 0]}, "epoch -1, index 0"),
        ({"sample": [9], "epoch": [0, 3], "index": [0, -1]}, "epoch 3, index -1"),
        ({"sample": [9], "epoch": [0, 3], "index": [0, 40]}, "index 40.*epoch 3 has 40 samples"),
    ],
)
def test_state_of_other_corpora_is_refused(state, complaint):
    with pytest.raises(UserError, match=complaint):
        mixed([1, 1], state, align="document")


@pytest.mark.parametrize("align", ["none", "bos", "document"])
def test_coverage_is_the_share_of_tokens_that_are_targets(align):
    order = order_of(align)
    starts = whole_epoch(order)
    samples = zip(starts, order.stops(starts))
    targets = {position for start, stop in samples for position in range(start + 1, stop)}
    assert order.coverage() == pytest.approx(len(targets) / (NUM_TOKENS - 1), abs=0.01)
