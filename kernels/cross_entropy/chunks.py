"""Sizes of the chunks of tokens in which `linear_cross_entropy` computes logits.

Shapes
    M tokens, C width, V vocabulary
"""

import functools

from torch import Tensor

from ..runtime import multiprocessors

CHUNK_BYTES = {"cuda": 560 << 20, "cpu": 64 << 20}
"""Bytes of logits in memory at a time: on a GPU up to 5,760 tokens of GPT-2's 50,304 logits in
bf16, which allows full waves of each product's tiles on any of them.

On a CPU every logit counts as fp32: 256 tokens. With 512, products are up to 7 % faster, for 51 MB
more."""
TILE = (128, 256)
"""Rows and columns of the result that one multiprocessor computes at a time in a large product."""


def tokens_at_a_time(x: Tensor, weight: Tensor, asked: int) -> int:
    """Returns the number of tokens per chunk for x (M, C), in the products' dtype.

    It is `asked`, or if that is 0 what suits the device; on a CPU as many as CHUNK_BYTES holds, in
    chunks of about the same size.
    """
    (M, C), V = x.shape, len(weight)
    if asked:
        return asked
    if x.device.type == "cuda":
        return chunk_on_gpu(M, V, C, x.element_size(), multiprocessors(x.device))
    most = CHUNK_BYTES["cpu"] // (V * 4)
    most = max(1, most // 128 * 128 or most)
    chunks = max(1, -(-M // most))
    return min(most, -(-M // (128 * chunks)) * 128)


@functools.cache
def chunk_on_gpu(M: int, V: int, C: int, itemsize: int, processors: int) -> int:
    """Returns the number of tokens per chunk with which a chunk's products leave least unused.

    The product that gives x's gradient has few tiles: 96 for 4096 tokens of width 768, which keep
    96 of 132 multiprocessors busy, and 132 for 5632.
    """
    most = CHUNK_BYTES["cuda"] // (V * itemsize)
    sizes = range(128, min(most, M + 127) + 1, 128)
    return min(sizes, key=lambda n: (rounds(M, n, V, C, processors), -n), default=max(1, most))


def rounds(M: int, n: int, V: int, C: int, processors: int) -> int:
    """Returns the time of the three products of M tokens in chunks of n, in multiply-adds along
    the sum of a tile: each product takes its waves of tiles times the length of its sums."""

    def waves(rows: int, columns: int) -> int:
        return -(-(-(-rows // TILE[0]) * -(-columns // TILE[1])) // processors)

    def chunk(n: int) -> int:
        return waves(n, V) * C + waves(n, C) * V + waves(V, C) * n

    return M // n * chunk(n) + (chunk(M % n) if M % n else 0)
