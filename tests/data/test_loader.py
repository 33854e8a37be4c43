"""The loader: contents of batches, and the thread that prepares them."""

import gc
import threading
from unittest import mock

import numpy as np
import pytest
import torch

from fastgpt.data.loader import IGNORED, Loader
from fastgpt.data.order import Mixture, SampleOrder
from fastgpt.errors import UserError
from tests.runs import before_each

# As its own token, each position tells where a sample starts.
POSITIONS = np.arange(5_000)
EOT = 999
TEXTS = [[7, 8, 9], [], [1, 2, 3, 4, 5, 6, 7], [10], [2, 4, 6, 8, 10]]
"""The documents of a corpus; each stands after an end-of-text token."""


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("fastgpt-loader")]


def open_loader(tokens=POSITIONS, *, context=16, state=None, **options):
    """Opens a loader of windows of one corpus, by default with 4 of them in a batch."""
    order = SampleOrder(len(tokens), context=context, seed=0)
    options = {"global_batch": 4, "micro_batch": 4, **options}
    return Loader([tokens], Mixture([order], [1.0], state), context=context, **options)


# --- what is in a batch ---------------------------------------------------------------------------


def test_targets_are_the_next_tokens_and_batches_are_not_written_again():
    tokens = np.random.default_rng(0).integers(0, 50_257, 1_000).astype(np.uint16)
    with open_loader(tokens) as loader:
        x, y = loader.next()
        assert loader.target_ratio == 1
        for _ in range(20):
            loader.next()
    assert x.shape == y.shape == (4, 16)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    for row, start in enumerate(SampleOrder(1_000, context=16, seed=0).take(0, 0, 4)[0]):
        assert x[row].tolist() == tokens[start : start + 16].tolist()
        assert y[row].tolist() == tokens[start + 1 : start + 17].tolist()


def of_texts(texts, *, context):
    """Returns the tokens of `texts`, and the order of their samples."""
    tokens = np.array([token for text in texts for token in (EOT, *text)])
    documents = np.flatnonzero(tokens == EOT)
    order = SampleOrder(len(tokens), context=context, seed=0, align="document", documents=documents)
    return tokens, order


def padded(text, context):
    """Makes x and y of a document in one row: cut at T + 1 tokens, or padded."""
    sample = [EOT, *text, EOT][: context + 1]
    fill = context - len(sample) + 1
    return sample[:-1] + [EOT] * fill, sample[1:] + [IGNORED] * fill


@pytest.mark.parametrize("context", [1, 4, 6, 7, 8, 9])
def test_document_samples_are_one_document_a_row_filled_up_or_cut(context):
    """The last document also ends with an end-of-text target, which no token follows."""
    tokens, order = of_texts(TEXTS, context=context)
    size = {"context": context, "global_batch": 5, "micro_batch": 5}
    with Loader([tokens], Mixture([order], [1.0]), **size, pad_id=EOT) as loader:
        x, y = loader.next()
    rows = list(zip(x.tolist(), y.tolist()))
    assert sorted(rows) == sorted(padded(text, context) for text in TEXTS)


def test_state_counts_what_was_handed_out_not_what_waits():
    size = SampleOrder(101, context=10, seed=0).epoch_size(0)
    with open_loader(np.arange(101), context=10, global_batch=size, micro_batch=1) as loader:
        for _ in range(size):
            assert loader.state() == {"sample": [0], "epoch": [0], "index": [0]}
            loader.next()
        assert loader.state() == {"sample": [size], "epoch": [1], "index": [0]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"context": 5_000}, "5,000 tokens, but one window of context 5,000 needs 5,001"),
        ({"global_batch": 6}, r"6 samples does not divide into micro-batches of 4 on 1 rank"),
        ({"world_size": 2}, "micro-batches of 4 on 2 rank"),
        ({"global_batch": 0}, "global batch of 0"),
        ({"state": {"sample": [0], "epoch": [0], "index": [313]}}, r"index 313.*31[12] samples"),
    ],
)
def test_bad_input_is_named(change, complaint):
    with pytest.raises(UserError, match=complaint):
        open_loader(**change)
    assert not loader_threads()


# --- the thread -----------------------------------------------------------------------------------


def test_error_in_the_thread_surfaces_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(SampleOrder, "take", mock.Mock(side_effect=OSError("the disk is gone")))
    with open_loader() as loader:
        for _ in range(3):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.next()


def test_waiting_for_a_batch_is_measured(monkeypatch):
    """The seconds spent waiting for a batch are counted; a batch that is ready adds none.

    By the clock of this test a read lasts 0.2 s, and begins when somebody waits for it.
    """
    clock, waits, more = mock.Mock(now=0.0), threading.Event(), threading.Event()

    def perf_counter():
        waits.set()
        return clock.now

    def read(*_):
        (more if clock.now else waits).wait()
        clock.now += 0.2

    clock.perf_counter = perf_counter
    monkeypatch.setattr("fastgpt.data.loader.time", clock)
    before_each(monkeypatch, Mixture, "take", read)
    with open_loader(micro_batch=2) as loader:
        for _ in range(2):  # the second half of what has been read is ready
            loader.next()
            assert loader.waited_s == 0.2
        more.set()


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
