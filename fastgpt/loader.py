"""Batches of inputs and next-token targets, in an order that only (seed, epoch, index) decides.

Shapes
    B = micro-batch rows, T = context.  tokens: (N,)   x, y: (B, T) int64, x[:, 1:] == y[:, :-1]

Order
    `fastgpt.order` gives one stream of samples; each global batch takes the next ones. Sample i of
    it belongs to micro-step i // (world * B), rank (i // B) % world, row i % B: the batch, and the
    order in it, are the same for any number of ranks and any accumulation.
"""

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastgpt.errors import UserError
from fastgpt.order import SampleOrder

IGNORED = -100
"""Target of a position that is not scored: the default `ignore_index` of PyTorch's losses."""
PREFETCHED = 4
"""Micro-batches that may wait, ready: enough to ride over the start of an epoch."""
JOIN_TIMEOUT_S = 10
"""How long closing waits for a batch that is being read; the thread is a daemon."""


class Loader:
    """Micro-batches for one rank, gathered ahead by one background thread.

    Args:
        tokens: (N,), any integer dtype, usually a memory map.
        context: T, in tokens.
        global_batch: samples per optimizer step over all ranks and micro-steps.
        micro_batch: B, samples per forward pass of one rank.
        rank: this process, 0 <= rank < world_size.
        world_size: processes that share each global batch.
        seed: decides the order, together with epoch and index.
        sampling: `epoch` visits every window of an epoch once; `random-windows` draws as many,
            with replacement, from every possible start.
        device: where batches end up; for CUDA through pinned memory, without a host sync.
        epoch: where to go on, from `state()`.
        index: where to go on, from `state()`.
    Raises:
        UserError: the corpus is shorter than one window, the global batch does not divide, the
            sampling is unknown, or (epoch, index) is not of this corpus.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        context: int,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        sampling: str = "epoch",
        device: torch.device | str = "cpu",
        epoch: int = 0,
        index: int = 0,
    ) -> None:
        if global_batch < 1 or micro_batch < 1 or global_batch % (world_size * micro_batch):
            raise UserError(
                f"a global batch of {global_batch} samples does not divide into micro-batches of"
                f" {micro_batch} on {world_size} rank(s)"
            )
        order = SampleOrder(len(tokens), context=context, seed=seed, sampling=sampling)
        if epoch < 0 or not 0 <= index < order.epoch_size(epoch):
            raise UserError(
                f"loader state (epoch {epoch}, index {index}) is not of this corpus, whose epoch"
                f" {epoch} has {order.epoch_size(epoch):,} windows"
            )
        self.accumulation = global_batch // (world_size * micro_batch)
        """Micro-batches per rank that make one global batch."""
        self.num_windows = (len(tokens) - 1) // context
        """Windows in an epoch; an epoch whose offset costs a window has one less."""
        self.device = torch.device(device)
        self._state = {"epoch": epoch, "index": index}
        self._pinned = self.device.type == "cuda"
        self._ready: queue.Queue[_Micro | Exception] = queue.Queue(PREFETCHED)
        producer = _Producer(
            # a plain view of the map: slicing np.memmap itself costs as much as copying a row
            tokens=np.asarray(tokens),
            order=order,
            grid=(self.accumulation, world_size, micro_batch),
            rank=rank,
            pinned=self._pinned,
        )
        # The thread must not hold the loader, or a forgotten loader could never be collected.
        stop = threading.Event()
        thread = threading.Thread(
            target=producer.run,
            args=(epoch, index, self._ready, stop),
            name="fastgpt-loader",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _shut_down, thread, self._ready, stop)
        thread.start()

    def next(self) -> tuple[Tensor, Tensor]:
        """The next micro-batch: x and y, each (B, T) int64 on `device`.

        Raises:
            RuntimeError: the loader is closed.
            Exception: whatever went wrong in the background thread.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the loader is closed")
        micro = self._ready.get()
        if isinstance(micro, Exception):
            self._ready.put(micro)  # the thread has ended: the next call must not wait for it
            raise micro
        if micro.state_after is not None:
            self._state = micro.state_after
        x, y = (t.to(self.device, non_blocking=self._pinned) for t in (micro.x, micro.y))
        return x, y

    def state(self) -> dict[str, int]:
        """`epoch` and `index` of the first sample after the global batches handed out whole.

        Batches that only wait in the queue do not count. In the middle of a global batch it is
        still the state of that batch's start.
        """
        return dict(self._state)

    def close(self) -> None:
        """Ends the background thread; more calls do nothing."""
        self._finalizer()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eval_batches(
    tokens: np.ndarray,
    *,
    context: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    max_tokens: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fixed windows of a validation split; the same ones for any number of ranks.

    With all windows every token but the first is the target of exactly one position: the last
    window reaches back for a full context, and does not score again what the one before it did.

    Args:
        tokens: (N,), any integer dtype, N >= 2.
        context: T, in tokens.
        micro_batch: B, rows of every batch.
        rank: this process; it takes every `world_size`-th window.
        world_size: processes that share the windows.
        max_tokens: about how many targets to score over all ranks, in windows spread evenly over
            the split; all of them if it is 0, negative, or as large as the split.
    Yields:
        x, y: (B, T) int64 on the CPU. Rows and positions that fill up a batch have y == -100; a
        rank without windows yields nothing.
    Raises:
        UserError: fewer than 2 tokens.
    """
    if len(tokens) < 2:
        raise UserError(f"the validation split needs at least 2 tokens, but has {len(tokens)}")
    num_windows = -(-(len(tokens) - 1) // context)
    chosen = np.arange(num_windows)
    if 0 < max_tokens < len(tokens) - 1:
        count = min(num_windows, max(1, max_tokens // context))
        chosen = np.arange(count) * num_windows // count
    mine = chosen[rank::world_size] * context
    return _eval_batches(np.asarray(tokens), mine, context, micro_batch)


def _eval_batches(
    tokens: np.ndarray, first_targets: np.ndarray, context: int, micro_batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for row in range(0, len(first_targets), micro_batch):
        x = torch.zeros((micro_batch, context), dtype=torch.int64)
        y = torch.full_like(x, IGNORED)
        for x_row, y_row, scored in zip(
            x.numpy(), y.numpy(), first_targets[row : row + micro_batch].tolist()
        ):
            start = max(0, min(scored, len(tokens) - 1 - context))
            window = tokens[start : start + context + 1]
            x_row[: len(window) - 1] = window[:-1]
            y_row[scored - start : len(window) - 1] = window[scored - start + 1 :]
        yield x, y


# --- the background thread ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Micro:
    x: Tensor
    y: Tensor
    state_after: dict[str, int] | None
    """Set on the last micro-batch of a global batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Producer:
    tokens: np.ndarray
    order: SampleOrder
    grid: tuple[int, int, int]
    """Micro-steps, ranks, rows: the shape of a global batch."""
    rank: int
    pinned: bool

    def run(
        self,
        epoch: int,
        index: int,
        ready: "queue.Queue[_Micro | Exception]",
        stop: threading.Event,
    ) -> None:
        """Fills `ready` until `stop`; an error is handed over as the last item."""
        try:
            while True:
                count = int(np.prod(self.grid))
                starts, epoch, index = self.order.take(epoch, index, count)
                mine = starts.reshape(self.grid)[:, self.rank]
                for step, rows in enumerate(mine, start=1):
                    state = {"epoch": epoch, "index": index} if step == len(mine) else None
                    x, y = self._gather(rows)
                    ready.put(_Micro(x=x, y=y, state_after=state))
                    if stop.is_set():
                        return
        except Exception as error:
            ready.put(error)

    def _gather(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        context = self.order.context
        shape = (len(starts), context)
        # Fresh memory each time: what was handed out belongs to the caller, and PyTorch's pinned
        # allocator keeps a freed block until the copy that reads it has finished.
        x, y = (torch.empty(shape, dtype=torch.int64, pin_memory=self.pinned) for _ in "xy")
        for x_row, y_row, start in zip(x.numpy(), y.numpy(), starts.tolist()):
            x_row[:] = self.tokens[start : start + context]
            y_row[:] = self.tokens[start + 1 : start + context + 1]
        return x, y


def _shut_down(thread: threading.Thread, ready: queue.Queue, stop: threading.Event) -> None:
    stop.set()
    # room for the one item the thread may be holding; after it, the thread looks at `stop`
    while not ready.empty():
        ready.get_nowait()
    # garbage collection may run in any thread, this one too
    if thread is not threading.current_thread():
        thread.join(timeout=JOIN_TIMEOUT_S)
