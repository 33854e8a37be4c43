import gc
import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpt.errors import UserError
from fastgpt.loader import Loader, eval_batches
from fastgpt.order import SAMPLINGS, SampleOrder

# As its own token, each position tells where a window starts.
POSITIONS = np.arange(5_000)


def loader_threads():
    return [t for t in threading.enumerate() if t.name == "fastgpt-loader"]


def take_starts(loader, steps):
    """First token of every sample of this rank: (steps, accumulation, B)."""
    batches = [[loader.next()[0] for _ in range(loader.accumulation)] for _ in range(steps)]
    return np.array([[x[:, 0].numpy() for x in step] for step in batches])


def global_starts(steps, *, world_size, accumulation, global_batch=16, **kwargs):
    """(steps, global_batch) first tokens, put together from all ranks in the documented order."""
    kwargs = {"context": 16, "seed": 3, **kwargs}
    micro = global_batch // (world_size * accumulation)
    parts = []
    for rank in range(world_size):
        with Loader(
            POSITIONS, global_batch=global_batch, micro_batch=micro, rank=rank,
            world_size=world_size, **kwargs,
        ) as loader:  # fmt: skip
            assert loader.accumulation == accumulation
            parts.append(take_starts(loader, steps))
    return np.stack(parts, axis=2).reshape(steps, global_batch)


def test_targets_are_the_next_tokens():
    tokens = np.random.default_rng(0).integers(0, 50_257, 1_000).astype(np.uint16)
    with Loader(tokens, context=16, global_batch=4, micro_batch=4) as loader:
        x, y = loader.next()
        order = SampleOrder(1_000, context=16, seed=0, sampling="epoch")
    assert x.shape == y.shape == (4, 16)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    for row, start in enumerate(order.take(0, 0, 4)[0]):
        assert x[row].tolist() == tokens[start : start + 16].tolist()
        assert y[row].tolist() == tokens[start + 1 : start + 17].tolist()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_global_batches_do_not_depend_on_ranks_or_accumulation(sampling):
    # 5,000 tokens are 312 windows, so 25 steps of 16 straddle the end of the first epoch
    expected = global_starts(25, world_size=1, accumulation=1, sampling=sampling)
    for world_size, accumulation in itertools.product((1, 2, 4), (1, 2, 4)):
        got = global_starts(25, world_size=world_size, accumulation=accumulation, sampling=sampling)
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=20)
@given(
    world_size=st.integers(1, 3), accumulation=st.integers(1, 3), micro=st.integers(1, 4),
    context=st.integers(1, 1_200),
)  # fmt: skip
def test_global_batches_follow_the_stream(world_size, accumulation, micro, context):
    size = world_size * accumulation * micro
    got = global_starts(
        3, world_size=world_size, accumulation=accumulation, global_batch=size, context=context
    )
    order = SampleOrder(len(POSITIONS), context=context, seed=3, sampling="epoch")
    assert got.ravel().tolist() == order.take(0, 0, 3 * size)[0].tolist()


def test_each_epoch_is_whole_though_batches_straddle_its_end():
    starts = global_starts(100, world_size=2, accumulation=2, global_batch=20, context=16).ravel()
    order = SampleOrder(len(POSITIONS), context=16, seed=3, sampling="epoch")
    begin = 0
    for epoch in range(3):
        size = order.epoch_size(epoch)
        assert size % 20  # the batch at this end does straddle
        windows = np.sort(starts[begin : begin + size])
        assert (np.diff(windows) == 16).all()
        assert windows[0] < 16
        begin += size


def test_global_batch_may_be_larger_than_an_epoch():
    starts = global_starts(1, world_size=1, accumulation=1, global_batch=16, context=1_200)
    assert starts.shape == (1, 16)


def test_state_counts_what_was_handed_out_not_what_waits():
    with Loader(POSITIONS, context=16, global_batch=8, micro_batch=2) as loader:
        assert loader.state() == {"epoch": 0, "index": 0}
        for _ in range(3):
            loader.next()
        assert loader.state() == {"epoch": 0, "index": 0}
        loader.next()
        assert loader.state() == {"epoch": 0, "index": 8}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_restoring_continues_exactly(sampling):
    args = {"context": 100, "global_batch": 7, "micro_batch": 7, "seed": 5, "sampling": sampling}
    states, batches = [], []
    with Loader(POSITIONS, **args) as loader:
        for _ in range(30):
            states.append(loader.state())
            batches.append(loader.next())
    assert states[-1]["epoch"] > 2
    assert {"epoch": 1, "index": 0} in states or any(s["index"] < 7 for s in states[1:])
    for step in range(0, 30, 3):
        with Loader(POSITIONS, **args, **states[step]) as restored:
            for x, y in batches[step:]:
                got_x, got_y = restored.next()
                assert torch.equal(got_x, x)
                assert torch.equal(got_y, y)


def test_state_at_the_end_of_an_epoch_is_the_start_of_the_next():
    order = SampleOrder(101, context=10, seed=0, sampling="epoch")
    size = order.epoch_size(0)
    with Loader(np.arange(101), context=10, global_batch=size, micro_batch=size) as loader:
        loader.next()
        assert loader.state() == {"epoch": 1, "index": 0}


def test_batches_handed_out_are_not_written_again():
    with Loader(POSITIONS, context=16, global_batch=4, micro_batch=4) as loader:
        x, _ = loader.next()
        before = x.clone()
        for _ in range(20):
            loader.next()
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"context": 5_000}, "5,000 tokens, but one window of context 5,000 needs 5,001"),
        ({"global_batch": 6}, r"6 samples does not divide into micro-batches of 4 on 1 rank"),
        ({"global_batch": 4, "world_size": 2}, "micro-batches of 4 on 2 rank"),
        ({"global_batch": 0}, "global batch of 0"),
        ({"sampling": "random-window"}, "did you mean 'random-windows'"),
        ({"index": 313}, r"epoch 0, index 313.*31[12] windows"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_bad_input_is_named(change, complaint):
    args = {"context": 16, "global_batch": 8, "micro_batch": 4, **change}
    with pytest.raises(UserError, match=complaint):
        Loader(POSITIONS, **args)
    assert not loader_threads()


def test_shortest_corpus_is_one_window():
    with Loader(np.arange(17), context=16, global_batch=2, micro_batch=2) as loader:
        assert loader.num_windows == 1
        x, y = loader.next()
    assert x.tolist() == [list(range(16))] * 2
    assert y[0].tolist() == list(range(1, 17))


def test_error_in_the_thread_surfaces_and_does_not_hang(monkeypatch):
    def unreadable(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(SampleOrder, "take", unreadable)
    with Loader(POSITIONS, context=16, global_batch=4, micro_batch=4) as loader:
        for _ in range(3):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.next()


def test_closing_ends_the_thread_whatever_waits():
    loader = Loader(POSITIONS, context=16, global_batch=4, micro_batch=4)
    loader.next()
    assert len(loader_threads()) == 1
    loader.close()
    loader.close()
    assert not loader_threads()
    with pytest.raises(RuntimeError, match="closed"):
        loader.next()


def test_forgotten_loader_leaves_no_thread():
    loader = Loader(POSITIONS, context=16, global_batch=4, micro_batch=4)
    loader.next()
    del loader
    gc.collect()
    assert not loader_threads()


@pytest.mark.gpu
def test_cuda_batches_equal_cpu_batches():
    args = {"context": 64, "global_batch": 8, "micro_batch": 4}
    with Loader(POSITIONS, **args) as cpu, Loader(POSITIONS, **args, device="cuda") as cuda:
        for _ in range(200):
            for expected, got in zip(cpu.next(), cuda.next(), strict=True):
                assert got.is_cuda
                assert torch.equal(got.cpu(), expected)


# --- evaluation -----------------------------------------------------------------------------------


def scored(num_tokens, *, context, micro_batch, world_size, max_tokens=0):
    """The target positions that all ranks score, in one sorted list."""
    found = []
    for rank in range(world_size):
        for x, y in eval_batches(
            np.arange(num_tokens, dtype=np.uint16), context=context, micro_batch=micro_batch,
            rank=rank, world_size=world_size, max_tokens=max_tokens,
        ):  # fmt: skip
            assert x.shape == y.shape == (micro_batch, context)
            assert x.dtype == y.dtype == torch.int64
            counted = y != -100
            assert counted.any()
            assert torch.equal(y[counted], x[counted] + 1)
            found += y[counted].tolist()
    return sorted(found)


@given(
    num_tokens=st.integers(2, 400), context=st.integers(1, 50), micro_batch=st.integers(1, 5),
    world_size=st.integers(1, 4),
)  # fmt: skip
def test_all_windows_score_every_target_once(num_tokens, context, micro_batch, world_size):
    got = scored(num_tokens, context=context, micro_batch=micro_batch, world_size=world_size)
    assert got == list(range(1, num_tokens))


@given(max_tokens=st.integers(1, 1_000), world_size=st.integers(1, 4))
def test_part_of_the_windows_is_spread_and_the_same_for_all_ranks(max_tokens, world_size):
    args = {"context": 10, "micro_batch": 3, "max_tokens": max_tokens}
    got = scored(605, world_size=world_size, **args)
    assert got == scored(605, world_size=1, **args)
    assert len(got) == len(set(got))
    if max_tokens < 604:
        assert len(got) <= max(10, max_tokens)
        assert len(got) > max_tokens - 20
        windows = np.unique((np.array(got) - 1) // 10)
        assert np.ptp(np.diff(windows, append=61)) <= 1
    else:
        assert got == list(range(1, 605))


def test_last_window_keeps_its_context():
    *_, (x, y) = eval_batches(
        np.arange(26), context=10, micro_batch=1, rank=0, world_size=1, max_tokens=0
    )
    assert x.tolist() == [list(range(15, 25))]
    assert y.tolist() == [[-100] * 5 + list(range(21, 26))]


def test_rank_without_windows_yields_nothing():
    assert not list(
        eval_batches(np.arange(11), context=10, micro_batch=2, rank=1, world_size=2, max_tokens=0)
    )


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_split_without_a_target_is_refused_at_once(num_tokens):
    with pytest.raises(UserError, match=f"at least 2 tokens, but has {num_tokens}"):
        eval_batches(
            np.arange(num_tokens), context=1, micro_batch=1, rank=0, world_size=1, max_tokens=0
        )
