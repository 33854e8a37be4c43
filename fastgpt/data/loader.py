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
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastgpt.data.items import IGNORED, Items, item_batches
from fastgpt.data.order import Mixture, SampleOrder
from fastgpt.data.shards import Tokens
from fastgpt.device.device import kind_of
from fastgpt.errors import UserError, counted

PREFETCHED = 4
"""Number of micro-batches to prefetch, enough to bridge a slow read."""
JOIN_TIMEOUT_S = 10
"""Seconds that `close` waits for the background thread, which is a daemon."""


class Loader:
    """Data loader of one rank, which prefetches micro-batches in a background thread.

    Args:
        corpora: each (N,), sliceable, any integer dtype; usually `Tokens`. Or `Items` alone, whose
            numbers the samples are.
        samples: the stream of samples, which is read on from its present position.
        context: T, in tokens.
        global_batch: samples per optimizer step over all ranks and micro-steps.
        micro_batch: B, samples per forward pass of one rank.
        pad_id: padding of x, also the target after the last document of a corpus.
        device: device of the batches; CUDA gets them from pinned memory, without a host sync.
    Raises:
        UserError: the global batch is not a multiple of ranks x micro-batch.
    """

    def __init__(
        self,
        corpora: Sequence[np.ndarray | Tokens | Items],
        samples: Mixture,
        *,
        context: int,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        pad_id: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if global_batch < 1 or micro_batch < 1 or global_batch % (world_size * micro_batch):
            raise UserError(
                f"a global batch of {counted(global_batch, 'sample')} does not divide into"
                f" micro-batches of {micro_batch} on {counted(world_size, 'rank')}"
            )
        self.accumulation = global_batch // (world_size * micro_batch)
        """Number of micro-batches per rank in a global batch."""
        self.share = 1.0
        """Number of targets in the last micro-batch, relative to the mean in its global batch; 1
        without padding."""
        self.waited_s = 0.0
        """Total seconds that `next` has waited for batches."""
        self.device = torch.device(device)
        self._state = samples.state()
        self._pinned, pin_for = kind_of(self.device).pins, None
        if self._pinned:
            gpu = torch.get_device_module(self.device).current_device()
            pin_for = torch.device(self.device.type, gpu)
        self._ready: queue.Queue[_Micro | Exception] = queue.Queue(PREFETCHED)
        producer = _Producer(
            corpora=tuple(corpora),
            samples=samples,
            context=context,
            grid=(self.accumulation, world_size, micro_batch),
            rank=rank,
            pad_id=pad_id,
            pin_for=pin_for,
        )
        # The thread must not hold the loader, or a forgotten loader could never be collected.
        stop = threading.Event()
        thread = threading.Thread(
            target=producer.run, args=(self._ready, stop), name="fastgpt-loader", daemon=True
        )
        self._finalizer = weakref.finalize(self, _shut_down, thread, self._ready, stop)
        thread.start()

    def next(self) -> tuple[Tensor, Tensor]:
        """Returns the next micro-batch: x and y, each (B, T) int64 on `device`.

        Raises:
            RuntimeError: the loader is closed.
            Exception: an error of the background thread.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the loader is closed")
        began = time.perf_counter()
        micro = self._ready.get()
        self.waited_s += time.perf_counter() - began
        if isinstance(micro, Exception):
            self._ready.put(micro)  # the thread has ended: the next call must not wait for it
            raise micro
        if micro.state_after is not None:
            self._state = micro.state_after
        self.share = micro.share
        x, y = (t.to(self.device, non_blocking=self._pinned) for t in (micro.x, micro.y))
        return x, y

    def state(self) -> dict[str, list[int]]:
        """Returns `Mixture.state` after the last complete global batch.

        Prefetched batches do not count. Within a global batch, it is the state at that batch's
        start.
        """
        return self._state

    def close(self) -> None:
        """Stops the background thread; further calls do nothing."""
        self._finalizer()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eval_batches(
    tokens: np.ndarray | Tokens | Items,
    *,
    context: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    max_tokens: int,
    documents: SampleOrder | None = None,
    pad_id: int = 0,
) -> "EvalBatches":
    """Makes batches of fixed windows of a validation split, the same for any number of ranks.

    Over all windows, each token but the first is a target exactly once: the last window overlaps
    the one before to have a full context, and the targets that they share are masked in it.

    Args:
        tokens: (N,), any integer dtype, N >= 2; or items, which are scored in place of windows.
        context: T, in tokens.
        micro_batch: B, rows of every batch.
        rank: this rank takes every `world_size`-th window.
        max_tokens: approximate number of targets to score over all ranks, in windows spread evenly
            over the split; 0, a negative number or one larger than the split: all of them.
        documents: documents of `tokens` to score, one per row, instead of windows.
    Returns:
        EvalBatches: x, y: (B, T) int64 on the CPU. Padding has y == -100; a rank without windows
        has no batches.
    Raises:
        UserError: fewer than 2 tokens.
    """
    if isinstance(tokens, Items):
        shared = {"rank": rank, "world_size": world_size, "max_tokens": max_tokens}
        made = item_batches(tokens, context=context, micro_batch=micro_batch, **shared)
        return EvalBatches(*made)
    if len(tokens) < 2:
        raise UserError(f"the validation split needs at least 2 tokens, but has {len(tokens)}")
    if documents is None:
        scored, targets = np.arange(0, len(tokens) - 1, context), context
        starts = scored.clip(max=max(0, len(tokens) - 1 - context))
        stops = np.minimum(starts + context + 1, len(tokens))
    else:
        scored = starts = documents.documents
        stops = documents.stops(starts)
        targets = float((stops - starts - 1).mean())
    windows = np.stack((starts, stops, scored - starts), axis=1)
    if 0 < max_tokens < len(tokens) - 1:
        count = min(len(windows), max(1, int(max_tokens // targets)))
        windows = windows[np.arange(count) * len(windows) // count]
    windows = windows[rank::world_size]
    batches = _eval_batches(tokens, windows, context, micro_batch, pad_id)
    return EvalBatches(batches, -(-len(windows) // micro_batch))


def random_batches(
    tokens: np.ndarray | Tokens,
    *,
    context: int,
    micro_batch: int,
    samples: int,
    seed: Sequence[int],
    rank: int,
    world_size: int,
) -> "EvalBatches":
    """Makes batches of random windows, drawn with replacement from `seed` alone.

    Args:
        tokens: (N,), any integer dtype.
        context: T, in tokens.
        micro_batch: B, rows of every batch.
        samples: number of windows over all ranks, a multiple of B.
        seed: integers of 32 bits.
        rank: this rank takes every `world_size`-th batch.
    Returns:
        EvalBatches: x, y: (B, T) int64 on the CPU.
    Raises:
        UserError: fewer than T + 1 tokens.
    """
    if len(tokens) <= context:
        raise UserError(
            f"a split has {counted(len(tokens), 'token')}, but one window of context {context:,}"
            f" needs {context + 1:,}"
        )
    stream = np.random.RandomState(list(seed))
    starts = stream.randint(len(tokens) - context, size=(samples // micro_batch, micro_batch))
    rows = starts[rank::world_size]
    return EvalBatches((_windows(tokens, row.tolist(), context) for row in rows), len(rows))


class EvalBatches:
    """Lazy iterable of evaluation batches (x, y), with their number as `len`."""

    def __init__(self, batches: Iterator[tuple[Tensor, Tensor]], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches

    def __len__(self) -> int:
        return self._count


def _windows(tokens: np.ndarray | Tokens, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    windows = np.stack([tokens[start : start + context + 1] for start in starts])
    both = torch.from_numpy(windows.astype(np.int64))
    return both[:, :-1], both[:, 1:]


def _eval_batches(
    tokens: np.ndarray | Tokens,
    windows: np.ndarray,
    context: int,
    micro_batch: int,
    pad_id: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    for row in range(0, len(windows), micro_batch):
        x = torch.full((micro_batch, context), pad_id, dtype=torch.int64)
        y = torch.full_like(x, IGNORED)
        for x_row, y_row, (start, stop, skipped) in zip(
            x.numpy(), y.numpy(), windows[row : row + micro_batch].tolist()
        ):
            _fill(x_row, y_row, tokens, start, stop, pad_id)
            y_row[:skipped] = IGNORED
        yield x, y


def _fill(
    x_row: np.ndarray,
    y_row: np.ndarray,
    tokens: np.ndarray | Tokens,
    start: int,
    stop: int,
    pad_id: int,
) -> None:
    """Copies one sample into one row of x and of y, both (T,) and already padded."""
    window = tokens[start:stop]
    count = stop - start - 1
    x_row[:count] = window[:count]
    y_row[: len(window) - 1] = window[1:]
    if len(window) == count:
        # the last document of the corpus has no end-of-text token after it
        y_row[count - 1] = pad_id


# --- the background thread ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Micro:
    x: Tensor
    y: Tensor
    share: float
    state_after: dict[str, list[int]] | None
    """State after the global batch, set on its last micro-batch only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Producer:
    corpora: tuple[np.ndarray | Tokens | Items, ...]
    samples: Mixture
    context: int
    grid: tuple[int, int, int]
    """Micro-steps, ranks, rows: the shape of a global batch."""
    rank: int
    pad_id: int
    pin_for: torch.device | None
    """GPU whose copies the pinned memory is for; None: ordinary memory."""

    def run(self, ready: "queue.Queue[_Micro | Exception]", stop: threading.Event) -> None:
        """Fills `ready` until `stop` is set; an error becomes the last item."""
        try:
            if self.pin_for is not None:  # a new thread begins on GPU 0, and would use memory there
                torch.get_device_module(self.pin_for).set_device(self.pin_for)
            while True:
                samples = self.samples.take(math.prod(self.grid))
                targets = self._targets(samples).reshape(self.grid).sum(-1)
                shares = (targets / targets.mean())[:, self.rank].tolist()
                mine = samples.reshape(*self.grid, 3)[:, self.rank]
                for step, rows in enumerate(mine, start=1):
                    state = self.samples.state() if step == len(mine) else None
                    x, y = self._gather(rows)
                    ready.put(_Micro(x=x, y=y, share=shares[step - 1], state_after=state))
                    if stop.is_set():
                        return
        except Exception as error:
            ready.put(error)

    def _targets(self, samples: np.ndarray) -> np.ndarray:
        """Counts the targets of each sample: (count,) int64."""
        if isinstance(self.corpora[0], Items):
            return self.corpora[0].counts[samples[:, 1]]
        return samples[:, 2] - samples[:, 1] - 1

    def _gather(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        shape = (len(rows), self.context)
        # New memory each time: earlier batches belong to the caller, and PyTorch's pinned allocator
        # keeps a freed block until the copy that reads it has finished.
        x, y = (
            torch.empty(shape, dtype=torch.int64, pin_memory=self.pin_for is not None) for _ in "xy"
        )
        for x_row, y_row, (number, start, stop) in zip(x.numpy(), y.numpy(), rows.tolist()):
            corpus = self.corpora[number]
            if isinstance(corpus, Items):
                x_row[:], y_row[:] = corpus[start]
                continue
            if stop - start <= self.context:
                x_row.fill(self.pad_id)
                y_row.fill(IGNORED)
            _fill(x_row, y_row, corpus, start, stop, self.pad_id)
        return x, y


def _shut_down(thread: threading.Thread, ready: queue.Queue, stop: threading.Event) -> None:
    stop.set()
    # room for the one item the thread may be holding; after it, the thread looks at `stop`
    while not ready.empty():
        ready.get_nowait()
    # garbage collection may run in any thread, this one too
    if thread is not threading.current_thread():
        thread.join(timeout=JOIN_TIMEOUT_S)
