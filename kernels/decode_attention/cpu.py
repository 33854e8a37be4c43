"""Attention over a cache that is batch-invariant, for devices without kernels."""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..invariant import products


def attention_invariant(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, block: int = 128
) -> Tensor:
    """Attention over a cache by `products` with blocks of keys.

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
