"""Where each training sample starts: a pure function of (seed, epoch, index).

Sample `index` of `epoch` is a window of T+1 tokens, starting at `start`. An epoch lays windows end
to end (stride T, so that each of its targets is scored once) from an offset drawn for that epoch,
and visits every one of them once, shuffled. The few tokens before the offset and after the last
whole window sit that epoch out; over the epochs, every token is read.
"""

import numpy as np

from fastgpt.errors import UserError, unknown_name

SAMPLINGS = ("epoch", "random-windows")


class SampleOrder:
    """The stream of samples, which runs on over the ends of epochs.

    Args:
        num_tokens: N, tokens in the corpus.
        context: T, in tokens.
        seed: any integer; its lowest 64 bits count.
        sampling: `epoch` visits every window of an epoch once; `random-windows` draws as many,
            with replacement, from every possible start.
    Raises:
        UserError: the corpus is shorter than one window, or the sampling is unknown.
    """

    def __init__(self, num_tokens: int, *, context: int, seed: int, sampling: str) -> None:
        if sampling not in SAMPLINGS:
            raise unknown_name("sampling", sampling, SAMPLINGS)
        if num_tokens < context + 1:
            raise UserError(
                f"the corpus has {num_tokens:,} tokens, but one window of context {context:,} needs"
                f" {context + 1:,}"
            )
        self.num_tokens, self.context, self.seed = num_tokens, context, seed
        self.sampling = sampling
        self._epoch, self._starts = -1, np.empty(0, np.int64)

    def epoch_size(self, epoch: int) -> int:
        """Samples in an epoch: (N - 1) // T, or one less where the offset costs a window."""
        return self._layout(epoch)[2]

    def take(self, epoch: int, index: int, count: int) -> tuple[np.ndarray, int, int]:
        """The next `count` samples from (epoch, index) on.

        Returns:
            (count,) int64 positions of first tokens, and the epoch and index that follow.
        """
        taken = []
        while count > 0:
            starts = self._starts_of(epoch)
            part = starts[index : index + count]
            taken.append(part)
            count, index = count - len(part), index + len(part)
            if index == len(starts):
                epoch, index = epoch + 1, 0
        return np.concatenate(taken), epoch, index

    def _layout(self, epoch: int) -> tuple[np.random.RandomState, int, int]:
        """The epoch's random stream after its first draw, its offset, and its number of samples."""
        # RandomState, not Generator: NEP 19 freezes its seeding and its draws for good, so a run
        # goes on in the same order under another numpy. It is seeded with words of 32 bits, and
        # draws are of a stated dtype because the default one differs between systems.
        words = (self.seed, self.seed >> 32, epoch)
        stream = np.random.RandomState([word & 0xFFFFFFFF for word in words])
        offsets = min(self.context, self.num_tokens - self.context)
        offset = int(stream.randint(offsets, dtype=np.int64))
        return stream, offset, (self.num_tokens - 1 - offset) // self.context

    def _starts_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            stream, offset, size = self._layout(epoch)
            if self.sampling == "epoch":
                starts = np.arange(size, dtype=np.int64) * self.context + offset
                stream.shuffle(starts)
            else:
                last = self.num_tokens - self.context
                starts = stream.randint(last, size=size, dtype=np.int64)
            self._epoch, self._starts = epoch, starts
        return self._starts
