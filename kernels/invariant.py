"""Batch invariance: the result of a row has the same bits whatever else is in the batch.

The other rows, their number, and how long they are do not matter then, so that generation gives the
same bits as scoring, alone or in a batch (He et al. 2025, "Defeating nondeterminism in LLM
inference"). Norms, losses, rotary embedding and attention have this property as they are: on CUDA
sizes of blocks follow from the width of a row alone. Matrix products, activations on a CPU and
attention over a cache get a form that has it, which `batch_invariant` turns on.

Shapes
    G matrices, M rows, K terms of each sum, N columns
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

ROWS = 8
"""Rows of the product that defines the bits."""
TILES = (512, 64, ROWS)
FEWER = (1, 2, 4, ROWS)
"""Rows that are multiplied at once, if each then gets those bits: of many, and of the last ones."""
SERIAL = 2**15 - 2**10
"""Elements that PyTorch hands to one thread on a CPU (its grain size is 2**15)."""

_on = False


def is_batch_invariant() -> bool:
    """Returns True inside `batch_invariant`."""
    return _on


@contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Gives each row of a batch the bits that it would have alone, in forward passes.

    It holds for `linear`, `bias_act` and `decode_attention` of this package, for the whole process,
    on one machine, with one number of threads. Products cost more time: they are made of tiles of
    512, 64, 8 or fewer rows, and each size of product is checked once against tiles of 8 rows.

    >>> with kernels.batch_invariant():
    ...     logits = model(tokens)
    """
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def products(a: Tensor, b: Tensor) -> Tensor:
    """Computes a (G, M, K) @ b (G, K, N), each row of `a` with the same bits whatever M and G.

    Returns:
        Tensor: (G, M, N), dtype of `a`.
    """
    M = a.shape[1]
    if 0 in (*a.shape, b.shape[2]):
        return a @ b
    key = (a.shape[0], *b.shape[1:], b.is_contiguous(), a.dtype, a.device, torch.get_num_threads())
    parts, first = [], 0
    while first < M:
        tile = _tile(M - first, key)
        some = a[:, first : first + max(tile, 1)]
        if tile:
            some = F.pad(some, (0, 0, 0, tile - some.shape[1])).contiguous()
            parts.append(_product(some, b))
        else:  # a machine on which the place in a tile matters
            parts.append(torch.cat([_product(x[None], y[None]) for x, y in zip(some, b)]))
        first += max(tile, 1)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1))[:, :M]


def _tile(rows: int, key: Any) -> int:
    """Returns how many of the next `rows` to multiply at once, or 0 for a row of each matrix."""
    many = (tile for tile in TILES if tile <= rows)
    few = (tile for tile in FEWER if tile >= rows)
    return next((tile for tile in (*many, *few) if _keeps_bits(tile, *key)), 0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a[0], b[0])[None] if len(a) == 1 else torch.bmm(a, b)


@functools.lru_cache(4096)
def _keeps_bits(
    tile: int, G: int, K: int, N: int, contiguous: bool, dtype: torch.dtype, device: torch.device,
    threads: int,
) -> bool:  # fmt: skip
    """Checks that a product of `tile` rows gives each the bits of a product of `ROWS`, alone.

    The order of a sum depends on sizes, layouts and places, not on the numbers, so that random ones
    show it. The number of threads only tells answers apart.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        a = torch.randn(G, ROWS, K, device=device).to(dtype)
        b = torch.randn(G, K, N, device=device).to(dtype)
        if not contiguous:
            b = b.transpose(1, 2).contiguous().transpose(1, 2)
    each = torch.cat([_product(x[None], y[None]) for x, y in zip(a, b)])
    if tile <= ROWS:  # each row in each place
        return all(
            torch.equal(_product(a.roll(n, 1)[:, :tile], b), each.roll(n, 1)[:, :tile])
            for n in range(ROWS)
        )
    repeats = (1, tile // ROWS, 1)
    return _keeps_bits(ROWS, G, K, N, contiguous, dtype, device, threads) and torch.equal(
        _product(a.repeat(repeats), b), each.repeat(repeats)
    )


def elementwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an elementwise function with the same bits for an element in any place.

    On a CPU PyTorch computes the last few elements of a thread's part one by one, and some
    functions (gelu, silu, exp2) give others bits then. So no part is shared among threads, and each
    is made of whole vectors.
    """
    if x.device.type != "cpu":
        return f(x)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % 64))
    return torch.cat([f(part) for part in flat.split(SERIAL)])[: x.numel()].view(x.shape)
