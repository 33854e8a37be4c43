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
import math
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


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Computes x (..., I) @ weight.T (O, I) + bias (O,) in `dtype`, by `products`."""
    rows = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1]).to(dtype)
    y = products(rows, weight.to(dtype).t()[None]).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(dtype)


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


def attention_invariant(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, block: int = 128
) -> Tensor:
    """Attention over a cache by `products` with blocks of keys, for devices without kernels.

    Keys that a query does not see change no bit of its result, so that it does not depend on T.

    Args:
        q: (B, Tq, H, D), fp32 or fp64.
        k: (B, T, K, D), dtype of `q`, finite, H a multiple of K.
        v: (B, T, K, D).
        seen: bool (B, Tq, T), the keys that a query sees.
        scale: factor on the scores.

    Returns:
        Tensor: (B, Tq, H, D); 0 for a query that sees no key.
    """
    (B, Tq, H, D), (T, K) = q.shape, k.shape[1:3]
    group = H // K
    rows = q.view(B, Tq, K, group, D).transpose(1, 2).reshape(B * K, Tq * group, D)
    top = rows.new_full((*rows.shape[:2], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(rows)
    for start in range(0, T, block):
        some = seen[:, :, start : start + block]
        queries = some.any(2).any(0).nonzero()
        if not len(queries):
            continue
        low, high = int(queries[0]) * group, (int(queries[-1]) + 1) * group
        missing = block - some.shape[2]
        keys, values = (
            F.pad(x[:, start : start + block], (0, 0, 0, 0, 0, missing)).transpose(1, 2)
            for x in (k, v)
        )
        mask = F.pad(some, (0, missing))[:, None, :, None].expand(B, K, Tq, group, block)
        mask = mask.reshape(B * K, Tq * group, block)[:, low:high]
        turned = keys.reshape(B * K, block, D).transpose(1, 2)
        scores = products(rows[:, low:high], turned) * scale
        scores = scores.masked_fill(~mask, -math.inf)
        before = top[:, low:high]
        highest = torch.maximum(before, scores.amax(2, keepdim=True))
        # a query that has seen no key yet: -inf - -inf is NaN
        safe = highest.masked_fill(highest == -math.inf, 0.0)
        weights, rescale = torch.exp(scores - safe), torch.exp(before - safe)
        total[:, low:high] = total[:, low:high] * rescale + weights.sum(2, keepdim=True)
        found = products(weights, values.reshape(B * K, block, D))
        out[:, low:high] = out[:, low:high] * rescale + found
        top[:, low:high] = highest
    out = out / total.masked_fill(total == 0.0, 1.0)
    return out.view(B, K, Tq, group, D).transpose(1, 2).reshape(B, Tq, H, D)
