"""Sizes of the chunks of tokens in which `linear_cross_entropy` computes logits.

Shapes
    M tokens, C width, V vocabulary
"""

import functools

from torch import Tensor

from ..runtime import memory, multiprocessors

CPU_BYTES = 64 << 20
"""Bytes of logits in memory at a time on a CPU, where each logit counts as fp32: 256 tokens of
GPT-2's 50,304 logits. With 512, products are up to 7 % faster, for 51 MB more."""
GPU_SHARE = 50
"""On a GPU logits take at most this part of its memory: 1.6 GiB, or 17,000 tokens in bf16, of 80.
Each chunk reads the head's weight twice, and its gradient once."""
TILE = (128, 256)
"""Rows and columns of the result that one multiprocessor computes at a time in a large product."""


def tokens_at_a_time(x: Tensor, weight: Tensor, asked: int) -> int:
    """Returns the number of tokens per chunk for x (M, C), in the products' dtype.

    It is `asked`, or if that is 0 what suits the device; on a CPU as many as CPU_BYTES hold, in
    chunks of about the same size.
    """
    (M, C), V = x.shape, len(weight)
    if asked:
        return asked
    if x.device.type == "cuda":
        most = memory(x.device) // GPU_SHARE // (V * x.element_size())
        return chunk_on_gpu(M, V, C, most, multiprocessors(x.device))
    most = CPU_BYTES // (V * 4)
    most = max(1, most // 128 * 128 or most)
    chunks = max(1, -(-M // most))
    return min(most, -(-M // (128 * chunks)) * 128)


@functools.cache
def chunk_on_gpu(M: int, V: int, C: int, most: int, processors: int) -> int:
    """Returns the number of tokens per chunk: the most with which its products leave little unused.

    The product that gives x's gradient has few tiles: 96 for 4096 tokens of width 768, which keep
    96 of 132 multiprocessors busy, and 132 for 5632. Up to 1 % more is unused for fewer chunks.

    Args:
        most: bound on the number.
    """
    times = {n: rounds(M, n, V, C, processors) for n in range(128, min(most, M + 127) + 1, 128)}
    enough = 1.01 * min(times.values(), default=0)
    return max((n for n, time in times.items() if time <= enough), default=max(1, most))


def rounds(M: int, n: int, V: int, C: int, processors: int) -> int:
    """Returns the time of the three products of M tokens in chunks of n, in multiply-adds along
    the sum of a tile: each product takes its waves of tiles times the length of its sums."""

    def waves(rows: int, columns: int) -> int:
        return -(-(-(-rows // TILE[0]) * -(-columns // TILE[1])) // processors)

    def chunk(n: int) -> int:
        return waves(n, V) * C + waves(n, C) * V + waves(V, C) * n

    return M // n * chunk(n) + (chunk(M % n) if M % n else 0)
