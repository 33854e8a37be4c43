"""Samples of an epoch and their order, for a corpus, a mixture, and any number of ranks."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpt.data.loader import IGNORED, Loader
from fastgpt.data.order import Mixture, SampleOrder
from fastgpt.errors import UserError

SAMPLINGS = ("epoch", "random-windows")
ALIGNMENTS = ("none", "bos", "document")

# 40 documents of 3 to 42 tokens: some shorter than a window of 11, some longer
DOCUMENTS = np.cumsum([0, *(3 + 7 * i % 40 for i in range(39))])
NUM_TOKENS = int(DOCUMENTS[-1]) + 15


def order_of(align="none", sampling="epoch", seed=1, context=10):
    return SampleOrder(
        NUM_TOKENS, context=context, seed=seed, sampling=sampling, align=align, documents=DOCUMENTS
    )


def whole_epoch(order, epoch=0):
    starts, *after = order.take(epoch, 0, order.epoch_size(epoch))
    assert after == [epoch + 1, 0]
    return starts


PINNED = {
    ("none", "epoch"): [685, 765, 565, 585, 845],
    ("none", "random-windows"): [642, 22, 89, 654, 598],
    ("bos", "epoch"): [864, 279, 140, 835, 258],
    ("bos", "random-windows"): [578, 430, 668, 128, 258],
    ("document", "epoch"): [140, 414, 649, 128, 405],
    ("document", "random-windows"): [265, 453, 13, 483, 535],
}
each_kind = pytest.mark.parametrize(("align", "sampling"), PINNED)


@each_kind
def test_order_never_changes_and_depends_on_seed_and_epoch(align, sampling):
    def sample(seed, epoch):
        return tuple(order_of(align, sampling, seed).take(epoch, 0, 20)[0])

    assert sample(2**40 + 7, 1)[:5] == tuple(PINNED[align, sampling])
    cases = [(0, 0), (0, 1), (1, 0), (2**32, 0), (-1, 0)]
    assert len({sample(*case) for case in cases}) == len(cases)


def test_corpus_without_a_window_is_named():
    with pytest.raises(UserError, match=r"has 10 tokens.*context 10 needs 11"):
        SampleOrder(10, context=10, seed=0)


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


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=30)


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


@given(lengths=lengths, context=st.integers(1, 40), epoch=st.integers(0, 5))
def test_document_samples_are_each_document_once_and_its_end(lengths, context, epoch):
    *documents, num_tokens = accumulate(lengths, initial=0)
    given = {"context": context, "align": "document", "documents": np.array(documents)}
    order = SampleOrder(num_tokens, seed=0, **given)
    starts = whole_epoch(order, epoch)
    assert sorted(starts.tolist()) == documents
    ends = {start: start + length + 1 for start, length in zip(documents, lengths)}
    expected = [min(ends[start], start + context + 1) for start in starts.tolist()]
    assert order.stops(starts).tolist() == expected


@pytest.mark.parametrize("align", ALIGNMENTS)
def test_coverage_is_the_share_of_tokens_that_are_targets(align):
    order = order_of(align)
    starts = whole_epoch(order)
    samples = zip(starts, order.stops(starts))
    targets = {position for start, stop in samples for position in range(start + 1, stop)}
    assert order.coverage() == pytest.approx(len(targets) / (NUM_TOKENS - 1), abs=0.01)


weights = st.lists(st.floats(0.001, 1), min_size=1, max_size=5)


def mixed(weights, state=None, align="none", sampling="epoch"):
    orders = [order_of(align, sampling, seed) for seed in range(len(weights))]
    return Mixture(orders, weights, state)


@settings(max_examples=60)
@given(weights=weights, scale=st.floats(0.01, 100))
def test_every_count_stays_within_a_few_of_its_share(weights, scale):
    """By chance alone, counts would be off by 50 and more."""
    corpora = mixed([weight * scale for weight in weights]).take(3_000)[:, 0]
    numbers = np.arange(1, 3_001)
    for corpus, weight in enumerate(weights):
        count = (corpora == corpus).cumsum()
        assert np.abs(count - numbers * weight / sum(weights)).max() < 6


@each_kind
@settings(max_examples=40)
@given(weights=weights, counts=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_mixture_reads_each_corpus_in_its_order_and_goes_on_from_any_state(
    align, sampling, weights, counts
):
    whole, chunks, state = mixed(weights, None, align, sampling), [], None
    samples = whole.take(sum(counts))
    for seed in range(len(weights)):
        _, starts, stops = samples[samples[:, 0] == seed].T
        order = order_of(align, sampling, seed)
        assert starts.tolist() == order.take(0, 0, len(starts))[0].tolist()
        assert stops.tolist() == order.stops(starts).tolist()
    for count in counts:
        mixture = mixed(weights, state, align, sampling)
        chunks.append(mixture.take(count))
        state = mixture.state()
    np.testing.assert_array_equal(np.concatenate(chunks), samples)
    assert state == whole.state()
    assert state["sample"] == [sum(counts)]


@pytest.mark.parametrize(
    ("sample", "epoch", "index", "complaint"),
    [
        (0, [0], [0], "corpora in the loader state: 1, expected 2"),
        (9, [0, -1], [0, 0], "epoch -1, index 0"),
        (9, [0, 3], [0, -1], "epoch 3, index -1"),
        (9, [0, 3], [0, 40], "index 40.*epoch 3 has 40 samples"),
        (-1, [0, 0], [0, 0], "damaged"),
        (9, [0, 2**62], [0, 0], "damaged"),
    ],
)
def test_state_of_other_corpora_is_refused(sample, epoch, index, complaint):
    with pytest.raises(UserError, match=complaint):
        mixed([1, 1], {"sample": [sample], "epoch": epoch, "index": index}, align="document")


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
        corpora.append(np.arange(total, dtype=np.uint16) + 10_000 * number)
        settings.append({"seed": draw(st.integers(0, 99)), "documents": np.array(documents)})
    weights = [draw(st.floats(0.01, 1)) for _ in corpora]

    def make(state=None):
        orders = [
            SampleOrder(len(c), context=context, sampling=sampling, align=align, **kwargs)
            for c, kwargs in zip(corpora, settings)
        ]
        return Mixture(orders, weights, state)

    return make, corpora, context


def read(case, steps, *, world_size, accumulation, size, state=None):
    """Reads x and y of all ranks in the documented order (steps, global batch, 2 T), the state
    after each step, and the shares (steps, micro-steps, ranks)."""
    make, corpora, context = case
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


@settings(max_examples=30)
@given(
    case=mixtures(), world_size=st.sampled_from([1, 2, 3, 8]), accumulation=st.integers(1, 3),
    rows=st.integers(1, 3), step=st.integers(0, 4),
)  # fmt: skip
def test_global_batches_are_the_stream_for_any_ranks_accumulation_and_resume(
    case, world_size, accumulation, rows, step
):
    """Ranks share the stream, and go on in it after any step; they weigh each target alike.

    A step adds up means of micro-batches, times their shares, and averages over the ranks.
    """
    make, corpora, context = case
    size, stream = rows * world_size * accumulation, make()
    stream.take(step * size)
    state, samples = stream.state(), make(stream.state()).take(3 * size).tolist()
    how = {"world_size": world_size, "accumulation": accumulation, "size": size}
    got, states, shares = read(case, 3, **how, state=state)
    for saved in states:
        stream.take(size)
        assert saved == stream.state()
    for row, (number, start, stop) in zip(got.reshape(-1, 2 * context).tolist(), samples):
        # the last document of a corpus ends with the padding's id, as no token follows it
        sample = [*corpora[number].tolist(), 999][start:stop]
        fill = context - len(sample) + 1
        assert row == [*sample[:-1], *[999] * fill, *sample[1:], *[IGNORED] * fill]

    y = got[:, :, context:].reshape(3, accumulation, world_size, -1)
    losses = np.ma.array(np.sin(y), mask=y == IGNORED)  # any loss that the target decides
    means = losses.mean(-1).filled(np.nan)
    for number in range(3):
        mean = (means[number] * shares[number]).mean()
        assert mean == pytest.approx(losses[number].mean(), rel=1e-12, abs=1e-12)
