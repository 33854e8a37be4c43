"""The loader's batches and its thread, and batches for evaluation."""

import gc
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpt.data.loader import IGNORED, Loader, eval_batches, random_batches
from fastgpt.data.order import Mixture, SampleOrder
from fastgpt.errors import UserError

EOT = 999


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("fastgpt-loader")]


def open_loader(tokens=5_000, *, context=16, state=None, **options):
    order = SampleOrder(tokens, context=context, seed=0)
    options = {"global_batch": 4, "micro_batch": 4, **options}
    mixture = Mixture([order], [1.0], state)
    return Loader([np.arange(tokens, dtype=np.uint16)], mixture, context=context, **options)


def test_batches_are_not_written_again():
    with open_loader() as loader:
        x, y = loader.next()
        assert loader.target_ratio == 1
        before = x.clone()
        for _ in range(20):
            loader.next()
    assert torch.equal(x, before)
    assert torch.equal(y, before + 1)
    assert x.dtype == y.dtype == torch.int64


def test_bad_input_is_named():
    for change, complaint in (
        ({"global_batch": 6}, "6 samples does not divide into micro-batches of 4 on 1 rank"),
        ({"world_size": 2}, "micro-batches of 4 on 2 rank"),
        ({"global_batch": 0}, "global batch of 0"),
    ):
        with pytest.raises(UserError, match=complaint):
            open_loader(**change)
    assert not loader_threads()


def test_error_in_the_thread_surfaces_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(SampleOrder, "take", mock.Mock(side_effect=OSError("the disk is gone")))
    with open_loader() as loader:
        for _ in range(3):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.next()


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "forgotten"])
def test_loader_leaves_no_thread(closed):
    loader = open_loader()
    loader.next()
    [thread] = loader_threads()
    if closed:
        loader.close()
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            loader.next()
    del loader
    gc.collect()
    thread.join(10)
    assert not loader_threads()


@pytest.mark.gpu
def test_cuda_batches_equal_cpu_batches():
    args = {"context": 64, "global_batch": 8}
    with open_loader(**args) as cpu, open_loader(**args, device="cuda") as cuda:
        for _ in range(200):
            for expected, got in zip(cpu.next(), cuda.next(), strict=True):
                assert got.is_cuda
                assert torch.equal(got.cpu(), expected)


ranks, rows = st.integers(1, 4), st.integers(1, 5)


def batches(tokens, ranks=1, make=eval_batches, **options):
    found = [make(tokens, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    return [pair for pairs in found for pair in pairs]


def scored(num_tokens, *, context=10, micro_batch=3, ranks=1, max_tokens=0):
    """Returns the sorted positions of the targets that all ranks together score."""
    found, size = [], {"context": context, "micro_batch": micro_batch, "max_tokens": max_tokens}
    for x, y in batches(np.arange(num_tokens, dtype=np.uint16), ranks, **size):
        assert x.shape == y.shape == (micro_batch, context)
        assert x.dtype == y.dtype == torch.int64
        counted = y != -100
        assert counted.any()
        assert torch.equal(y[counted], x[counted] + 1)
        found += y[counted].tolist()
    return sorted(found)


@settings(max_examples=60)
@given(num_tokens=st.integers(2, 400), context=st.integers(1, 50), rows=rows, ranks=ranks)
def test_all_windows_score_every_target_once(num_tokens, context, rows, ranks):
    got = scored(num_tokens, context=context, micro_batch=rows, ranks=ranks)
    assert got == list(range(1, num_tokens))


@settings(max_examples=60)
@given(max_tokens=st.integers(1, 1_000), ranks=ranks)
def test_part_of_the_windows_is_spread_and_the_same_for_all_ranks(max_tokens, ranks):
    got = scored(605, ranks=ranks, max_tokens=max_tokens)
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
    *_, (x, y) = batches(np.arange(26), context=10, micro_batch=1, max_tokens=0)
    assert x.tolist() == [list(range(15, 25))]
    assert y.tolist() == [[-100] * 5 + list(range(21, 26))]
    for size in (0, 1):
        with pytest.raises(UserError, match=f"at least 2 tokens, but has {size}"):
            scored(size, context=1)


def padded(text, context):
    """Makes x and y of a document in one row: cut at T + 1 tokens, or padded."""
    sample = [EOT, *text, EOT][: context + 1]
    fill = context - len(sample) + 1
    return sample[:-1] + [EOT] * fill, sample[1:] + [IGNORED] * fill


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=20), context=st.integers(1, 25),
    rows=rows, ranks=ranks,
)  # fmt: skip
def test_each_document_is_scored_once_up_to_its_cut(lengths, context, rows, ranks):
    texts = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    tokens = np.array([token for text in texts for token in (EOT, *text)])
    documents = np.flatnonzero(tokens == EOT)
    order = SampleOrder(len(tokens), context=context, seed=0, align="document", documents=documents)
    size = {"context": context, "micro_batch": rows, "max_tokens": 0}
    pairs = batches(tokens, ranks, **size, documents=order, pad_id=EOT)
    found = [row for x, y in pairs for row in zip(x.tolist(), y.tolist())]
    scored = [(a, b) for a, b in found if b != [IGNORED] * context]
    assert sorted(scored) == sorted(padded(text, context) for text in texts)


def test_budget_counts_the_targets_that_are_scored():
    """A context of 10 scores 10 of a document's 100 tokens."""
    starts = np.arange(0, 4000, 100)
    order = SampleOrder(4000, context=10, seed=0, align="document", documents=starts)
    size = {"context": 10, "micro_batch": 1, "max_tokens": 200}
    found = batches(np.zeros(4000, np.uint16), **size, documents=order)
    assert sum(int((y != IGNORED).sum()) for _, y in found) == 200


def drawn(*, seed=(3, 0, 0), ranks=1, size=100):
    """Draws 12 random windows of 5 tokens in batches of 2, over all ranks: x and y (12, 5)."""
    options = {"context": 5, "micro_batch": 2, "samples": 12, "seed": seed}
    xs, ys = zip(*batches(np.arange(size), ranks, random_batches, **options))
    return torch.cat(xs), torch.cat(ys)


def test_random_windows_are_windows_and_a_function_of_their_seed():
    x, y = drawn()
    assert x.shape == y.shape == (12, 5)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(5))
    assert len(set(x[:, 0].tolist())) > 6
    assert torch.equal(x, drawn()[0])
    assert sorted(x.tolist()) == sorted(drawn(ranks=3)[0].tolist())
    for seed in ((3, 1, 0), (3, 0, 1), (4, 0, 0)):  # another step, split or run
        assert not torch.equal(x, drawn(seed=seed)[0])
    assert drawn(size=6)[1].max() == 5  # the only window there is ends with the last token
    with pytest.raises(UserError, match="has 5 tokens, but one window of context 5 needs 6"):
        drawn(size=5)
