"""Batches of inputs and next-token targets, in an order that depends on (seed, epoch, index) only.

Shapes
    B = micro-batch rows, T = context.  tokens: (N,)   x, y: (B, T) int64, x[:, 1:] == y[:, :-1]
    A sample of fewer than T+1 tokens is padded: x with a padding id, y with -100.

Order
    `fastgpt.data.order` gives one stream of samples; each global batch takes the next ones. Sample
    i of it belongs to micro-step i // (world * B), rank (i // B) % world, row i % B: the batch, and
    the order in it, are the same for any number of ranks and any accumulation.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgpt.data.items import IGNORED, MapDataset
from fastgpt.data.order import Mixture, SampleOrder
from fastgpt.data.shards import Tokens
from fastgpt.device.device import kind_of
from fastgpt.errors import UserError, counted

PREFETCHED = 4
"""Number of micro-batches to prefetch, enough to bridge a slow read."""

TokenSource = np.ndarray | Tokens | MapDataset
"""Tokens (N,) of any integer dtype; or items, whose numbers take the place of samples' starts."""


class Loader(AbstractContextManager):
    """Data loader of one rank, which prefetches micro-batches in a background thread.

    Args:
        corpora: what the samples are of; `MapDataset` are alone.
        samples: the stream of samples, which is read on from its present position.
        context: T, in tokens.
        global_batch: samples per optimizer step over all ranks and micro-steps.
        micro_batch: B, samples per forward pass of one rank.
        pad_id: padding of x, also the target after the last document of a corpus.
        device: CUDA gets the batches from pinned memory, without a host sync.
    Raises:
        UserError: the global batch is not a multiple of ranks x micro-batch.
    """

    def __init__(
        self, corpora: Sequence[TokenSource], samples: Mixture, *, context: int, global_batch: int,
        micro_batch: int, rank: int = 0, world_size: int = 1, pad_id: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if global_batch < 1 or micro_batch < 1 or global_batch % (world_size * micro_batch):
            raise UserError(
                f"a global batch of {counted(global_batch, 'sample')} does not divide into"
                f" micro-batches of {micro_batch} on {counted(world_size, 'rank')}"
            )
        self.accumulation = global_batch // (world_size * micro_batch)
        """Number of micro-batches per rank in a global batch."""
        self.target_ratio = 1.0
        """Number of targets in the last micro-batch, relative to the mean in its global batch; 1
        without padding."""
        self.waited_s = 0.0
        """Total seconds that `next` has waited for batches."""
        self.device = torch.device(device)
        self._state = samples.state()
        self._pinned, set_device = kind_of(self.device).pins, None
        if self._pinned:  # a new thread begins on GPU 0, and would use memory there
            gpu = torch.get_device_module(self.device)
            set_device = partial(gpu.set_device, gpu.current_device())
        grid = self.accumulation, world_size, micro_batch
        micros = _micro_batches(
            tuple(corpora), samples, grid, rank, context, pad_id, pinned=self._pinned
        )
        # the thread does not hold the loader, and ends when the pool is forgotten with it
        self._pool = ThreadPoolExecutor(1, "fastgpt-loader", set_device)
        self._submit = partial(self._pool.submit, next, micros)
        self._ready: deque[Any] = deque(self._submit() for _ in range(PREFETCHED))

    def next(self) -> tuple[Tensor, Tensor]:
        """Returns the next micro-batch: x and y, each (B, T) int64 on `device`.

        Raises:
            RuntimeError: the loader is closed.
            Exception: an error of the background thread.
        """
        if not self._ready:
            raise RuntimeError("the loader is closed")
        began = time.perf_counter()
        # an error stays the first, for the next call
        x, y, self.target_ratio, state = self._ready[0].result()
        self.waited_s += time.perf_counter() - began
        self._ready.popleft()
        self._ready.append(self._submit())
        self._state = state or self._state
        x, y = (t.to(self.device, non_blocking=self._pinned) for t in (x, y))
        return x, y

    def state(self) -> dict[str, list[int]]:
        """Returns `Mixture.state` after the last complete global batch that `next` returned."""
        return self._state

    def close(self) -> None:
        """Stops the background thread; further calls do nothing."""
        self._ready.clear()
        self._pool.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()


def eval_batches(
    tokens: TokenSource, *, context: int, micro_batch: int, rank: int, world_size: int,
    max_tokens: int, documents: SampleOrder | None = None, pad_id: int = 0,
) -> "EvalBatches":  # fmt: skip
    """Makes batches of fixed windows of a validation split, the same for any number of ranks.

    Over all windows, each token but the first is a target exactly once: the last window overlaps
    the one before to have a full context, and the targets that they share are masked in it.

    Args:
        tokens: at least 2; of items, each is a row.
        rank: this rank takes every `world_size`-th row.
        max_tokens: approximate number of targets to score over all ranks, in rows spread evenly
            over the split; 0, or more than there are: all of them.
        documents: documents of `tokens` to score, one per row, instead of windows.
    Returns:
        EvalBatches: x, y: (B, T) int64 on the CPU. Padding has y == -100; a rank without rows has
        no batches.
    Raises:
        UserError: fewer than 2 tokens.
    """
    total = len(tokens) - 1
    if isinstance(tokens, MapDataset):
        starts = scored = np.arange(tokens.size)
        stops, pad_id = starts, 0
        total, targets = int(tokens.counts.sum()), tokens.counts.mean()
    elif total < 1:
        raise UserError(f"the validation split needs at least 2 tokens, but has {len(tokens)}")
    elif documents is not None:
        starts = scored = documents.documents
        stops = documents.stops(starts)
        targets = float((stops - starts - 1).mean())
    else:
        scored, targets = np.arange(0, total, context), context
        starts = scored.clip(max=max(0, total - context))
        stops = np.minimum(starts + context + 1, total + 1)
    windows = np.stack((starts, stops, scored - starts), axis=1)
    if 0 < max_tokens < total:
        count = min(len(windows), max(1, int(max_tokens // targets)))
        windows = windows[np.arange(count) * len(windows) // count]
    return EvalBatches(tokens, windows[rank::world_size], micro_batch, context, pad_id)


def random_batches(
    tokens: np.ndarray | Tokens, *, context: int, micro_batch: int, rank: int, world_size: int,
    samples: int, seed: Sequence[int],
) -> "EvalBatches":  # fmt: skip
    """Makes batches of random windows, (B, T) each, drawn with replacement from `seed` alone.

    Args:
        samples: number of windows over all ranks, rounded up to a multiple of B.
        seed: integers of 32 bits.
        rank: this rank takes every `world_size`-th batch.
    Raises:
        UserError: fewer than T + 1 tokens.
    """
    if len(tokens) <= context:
        raise UserError(
            f"a split has {counted(len(tokens), 'token')}, but one window of context {context:,}"
            f" needs {context + 1:,}"
        )
    stream = np.random.RandomState(list(seed))
    batches = -(-samples // micro_batch)
    starts = stream.randint(len(tokens) - context, size=(batches, micro_batch))
    starts = starts[rank::world_size].reshape(-1)
    windows = np.stack((starts, starts + context + 1, np.zeros_like(starts)), axis=1)
    return EvalBatches(tokens, windows, micro_batch, context, pad_id=0)


class EvalBatches:
    """Lazy iterable of evaluation batches (x, y), with their number as `len`.

    Args:
        windows: (n, 3) int64 of start, stop, and the number of first targets that do not count.
    """

    def __init__(
        self, tokens: TokenSource, windows: np.ndarray, micro_batch: int, context: int, pad_id: int
    ) -> None:
        self._tokens, self._windows, self._pad_id = tokens, windows, pad_id
        self._shape = micro_batch, context
        self.count = -(-len(windows) // micro_batch)
        """Number of batches; a larger one adds batches without targets."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._shape[0]
        for first in range(0, self.count * rows, rows):
            chunk = self._windows[first : first + rows]
            samples = np.insert(chunk[:, :2], 0, 0, axis=1)
            x, y = _gather([self._tokens], samples, self._shape, self._pad_id)
            for y_row, masked in zip(y, chunk[:, 2].tolist()):
                y_row[:masked] = IGNORED
            yield x, y


def _gather(
    corpora: Sequence[TokenSource], samples: np.ndarray, shape: tuple[int, int], pad_id: int, *,
    pinned: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Copies samples, (n, 3) of corpus, start, stop, into x and y (B, T), and pads the rest."""
    # New memory each time: earlier batches belong to the caller, and PyTorch's pinned allocator
    # keeps a freed block until the copy that reads it has finished.
    x, y = (torch.empty(shape, dtype=torch.int64, pin_memory=pinned) for _ in "xy")
    x[len(samples) :], y[len(samples) :] = pad_id, IGNORED
    for x_row, y_row, (number, start, stop) in zip(x.numpy(), y.numpy(), samples.tolist()):
        corpus = corpora[number]
        if isinstance(corpus, MapDataset):
            x_row[:], y_row[:] = corpus[start]
            continue
        window, count = corpus[start:stop], stop - start - 1
        x_row[:count], x_row[count:] = window[:count], pad_id
        y_row[: len(window) - 1], y_row[len(window) - 1 :] = window[1:], IGNORED
        if len(window) == count:
            # the last document of the corpus has no end-of-text token after it
            y_row[count - 1] = pad_id
    return x, y


# --- the background thread ------------------------------------------------------------------------


def _micro_batches(
    corpora: Sequence[TokenSource], samples: Mixture, grid: tuple[int, int, int], rank: int,
    context: int, pad_id: int, *, pinned: bool,
) -> Iterator[tuple[Tensor, Tensor, float, dict[str, list[int]] | None]]:  # fmt: skip
    """Yields this rank's micro-batches: x, y, their share of the targets, and the state after them.

    The last micro-batch of a global batch alone has a state.

    Args:
        grid: micro-steps, ranks and rows of a global batch.
    """
    while True:
        spans = samples.take(math.prod(grid))
        if isinstance(corpora[0], MapDataset):
            targets = corpora[0].counts[spans[:, 1]]
        else:
            targets = spans[:, 2] - spans[:, 1] - 1
        targets = targets.reshape(grid).sum(-1)
        shares = (targets / targets.mean())[:, rank].tolist()
        mine = spans.reshape(*grid, 3)[:, rank]
        for step, (rows, share) in enumerate(zip(mine, shares), start=1):
            state = samples.state() if step == len(mine) else None
            x, y = _gather(corpora, rows, (len(rows), context), pad_id, pinned=pinned)
            yield x, y, share, state
