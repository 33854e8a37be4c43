"""Order of training samples, as a pure function of (seed, epoch, index).

A sample is up to T+1 tokens, [start, stop) of one corpus. How an epoch is laid out:

none        Windows end to end (stride T, so that each of their targets is scored once) from an
            offset drawn for the epoch. The few tokens before the offset and after the last whole
            window are left out of that epoch; over the epochs, every token is read.
bos         Windows that begin where a document begins: after one, the next document that begins
            at its end or later, or with a chance of 1/4 the one after that. Without those skips
            every epoch would soon follow the same chain, and cut the same ends off documents. What
            a document holds beyond T+1 tokens is never read.
document    One document a sample, with the end-of-text token that follows it; cut after T+1 tokens.

An epoch visits every sample once, shuffled; or draws as many with replacement (`random-windows`).
Several corpora are mixed by weight, sample by sample, each in its own order.
"""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from fastgpt.errors import UserError, counted

SKIP_ONE_IN = 4
"""Mean number of `bos` windows between two documents that are skipped."""
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples modulo 2^64 are spread evenly (Weyl's theorem)."""


class SampleOrder:
    """Endless stream of samples of one corpus, epoch after epoch.

    Args:
        context: T, in tokens.
        seed: any integer, of which the lowest 64 bits are used.
        sampling: `epoch` visits every sample of an epoch once; `random-windows` draws as many,
            with replacement, from every possible start.
        align: `none`, `bos` or `document`, see above.
        documents: (D,) int64, increasing offsets where documents begin; needed unless `none`.
    Raises:
        UserError: the corpus is shorter than one window.
    """

    def __init__(
        self, num_tokens: int, *, context: int, seed: int, sampling: str = "epoch",
        align: str = "none", documents: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        if align != "document" and num_tokens < context + 1:
            raise UserError(
                f"the corpus has {counted(num_tokens, 'token')}, but one window of context"
                f" {context:,} needs {context + 1:,}"
            )
        self.num_tokens, self.context, self.seed = num_tokens, context, seed
        self.sampling, self.align = sampling, align
        self._epoch, self._starts = -1, np.empty(0, np.int64)
        self.documents = np.empty(0, np.int64) if documents is None else documents
        self._ends = np.append(self.documents[1:], num_tokens)
        if align == "bos":
            fits = int(self.documents.searchsorted(num_tokens - context))
            # document n's window ends where document next[n] or an earlier one begins
            self._next = self.documents.searchsorted(self.documents[:fits] + context)
            if not fits:
                raise UserError(
                    f"no document begins {context + 1:,} tokens before the end of the corpus:"
                    " windows that begin with documents need a smaller context or more text"
                )

    def epoch_size(self, epoch: int) -> int:
        """Returns the number of samples in an epoch."""
        return len(self._starts_of(epoch))

    def coverage(self) -> float:
        """Returns the expected share of the corpus's tokens that are targets in the first epoch."""
        if self.sampling == "random-windows":
            return 1 - math.exp(-1)  # as many draws as there are samples, with replacement
        starts = self._starts_of(0)
        return float((self.stops(starts) - starts - 1).sum() / max(1, self.num_tokens - 1))

    def take(self, epoch: int, index: int, count: int) -> tuple[np.ndarray, int, int]:
        """Returns the next `count` samples from (epoch, index) on.

        Returns:
            (count,) int64 offsets of first tokens, and the epoch and index that follow.
        """
        chunks = [np.empty(0, np.int64)]
        while count > 0:
            starts = self._starts_of(epoch)
            part = starts[index : index + count]
            chunks.append(part)
            count, index = count - len(part), index + len(part)
            if index == len(starts):
                epoch, index = epoch + 1, 0
        return np.concatenate(chunks), epoch, index

    def stops(self, starts: np.ndarray) -> np.ndarray:
        """Returns the end of each sample: (count,) int64, one past its last token.

        The last document ends one past the end of the corpus, in place of an end-of-text token.
        """
        stops = starts + self.context + 1
        if self.align == "document":
            following = self._ends[self.documents.searchsorted(starts, side="right") - 1]
            stops = np.minimum(stops, following + 1)
        return stops

    def _random(self, epoch: int) -> np.random.RandomState:
        # RandomState, not Generator: NEP 19 freezes its seeding and its draws for good, so a run
        # goes on in the same order under another numpy. It is seeded with words of 32 bits, and
        # draws are of a stated dtype because the default one differs between systems.
        words = (self.seed, self.seed >> 32, epoch)
        return np.random.RandomState([word & 0xFFFFFFFF for word in words])

    def _starts_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            make = self._windows if self.align == "none" else self._aligned
            self._epoch, self._starts = epoch, make(epoch)
        return self._starts

    def _windows(self, epoch: int) -> np.ndarray:
        stream = self._random(epoch)
        offsets = min(self.context, self.num_tokens - self.context)
        offset = int(stream.randint(offsets, dtype=np.int64))
        size = (self.num_tokens - 1 - offset) // self.context
        if self.sampling == "epoch":
            starts = np.arange(size, dtype=np.int64) * self.context + offset
            stream.shuffle(starts)
            return starts
        return stream.randint(self.num_tokens - self.context, size=size, dtype=np.int64)

    def _aligned(self, epoch: int) -> np.ndarray:
        stream = self._random(epoch)
        if self.align == "document":
            starts, choices = self.documents.copy(), self.documents
        else:
            first = int(stream.randint(max(1, int(self._next[0])), dtype=np.int64))
            skips = stream.randint(SKIP_ONE_IN, size=len(self._next), dtype=np.int64) == 0
            starts, choices = self._chain(first, skips), self.documents[: len(self._next)]
        if self.sampling == "epoch":
            stream.shuffle(starts)
            return starts
        return choices[stream.randint(len(choices), size=len(starts), dtype=np.int64)]

    def _chain(self, first: int, skips: np.ndarray) -> np.ndarray:
        """Returns the start offsets of consecutive windows that each begin with a document.

        The first begins at document number `first`, or at the last document that leaves room for
        one.
        """
        following, chosen = self._next + skips, array("q")
        document = min(first, len(following) - 1)
        while document < len(following):
            chosen.append(document)
            document = following.item(document)
        return self.documents[np.frombuffer(chosen, np.int64)]


class Mixture:
    """Stream of samples from several corpora, mixed by weight.

    The corpus of each sample is chosen without randomness: after n samples, the count of each
    corpus is within a few of n times its weight.

    Args:
        weights: one for each of `orders`; only their ratios matter.
        state: from `state()`; None: the beginning.
    Raises:
        UserError: the state does not fit these corpora.
    """

    def __init__(
        self, orders: Sequence[SampleOrder], weights: Sequence[float],
        state: dict[str, list[int]] | None = None,
    ) -> None:  # fmt: skip
        self.orders = tuple(orders)
        shares = np.cumsum(np.asarray(weights, np.float64)) / np.sum(weights)
        # at most the largest double below 2^64, if the last weight is too small to matter
        self._bounds = np.minimum(shares[:-1] * 2.0**64, 2.0**64 - 2048).astype(np.uint64)
        zeros = [0] * len(self.orders)
        state = state or {"sample": [0], "epoch": zeros, "index": zeros}
        numbers = [state.get(name) for name in ("sample", "epoch", "index")]
        valid = all(
            isinstance(some, list) and all(type(n) is int and abs(n) < 2**62 for n in some)
            for some in numbers
        )
        if not valid or state["sample"] < [0]:
            raise UserError("the loader state is damaged: expected lists of counts")
        self._sample = state["sample"][0]
        self._cursors = list(zip(state["epoch"], state["index"]))
        if len(self._cursors) != len(self.orders):
            raise UserError(
                f"corpora in the loader state: {len(self._cursors)}, expected {len(self.orders)}"
            )
        for order, (epoch, index) in zip(self.orders, self._cursors):
            if epoch < 0 or not 0 <= index < order.epoch_size(epoch):
                raise UserError(
                    f"loader state (epoch {epoch}, index {index}) is not of this corpus, whose"
                    f" epoch {epoch} has {counted(order.epoch_size(epoch), 'sample')}"
                )

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` samples: (count, 3) int64 of corpus, start, stop."""
        numbers = np.arange(self._sample, self._sample + count, dtype=np.uint64)
        corpora = self._bounds.searchsorted(numbers * np.uint64(GOLDEN), side="right")
        samples = np.empty((count, 3), np.int64)
        samples[:, 0] = corpora
        for number, order in enumerate(self.orders):
            mine = corpora == number
            starts, *place = order.take(*self._cursors[number], int(mine.sum()))
            self._cursors[number] = (place[0], place[1])
            samples[mine, 1], samples[mine, 2] = starts, order.stops(starts)
        self._sample += count
        return samples

    def state(self) -> dict[str, list[int]]:
        """Returns the number of samples taken, and each corpus's next epoch and index."""
        epochs, indices = zip(*self._cursors)
        return {"sample": [self._sample], "epoch": list(epochs), "index": list(indices)}
