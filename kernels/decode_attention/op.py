"""Attention of the last tokens of each sequence over a cache of keys and values.

Shapes
    B batch, Tq new tokens, Tmax positions of the cache, H query heads, K key/value heads (H a
    multiple of K), D head dim
    q: (B, Tq, H, D)   k_cache, v_cache: (B, Tmax, K, D), or pages (pages, page, K, D) and
    block_table: (B, max_pages)   lengths: (B,)   out: (B, Tq, H, D)
Source
    As for `kernels.attention`; pages: Kwon et al. 2023, arXiv:2309.06180.  Splits of the keys and
    traffic: docs/kernels/decode_attention.md.

The new tokens are already in the cache. There is no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from ..attention.plain import attend
from ..checks import INTEGERS, check_head, check_like, check_qkv, check_scale
from ..invariant import is_batch_invariant
from ..runtime import Op, autocast_dtype, filled, like, runs_kernels, without_autocast
from .cpu import attention_invariant


def decode_attention_ref(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, starts: Tensor | None = None,
    block_table: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Reference of `decode_attention` in plain PyTorch, scores and softmax in fp32.

    Arguments, result and errors are those of `decode_attention`; fp64 is also accepted and kept.
    """
    q, k_cache, v_cache = (x.to(autocast_dtype(x)) for x in (q, k_cache, v_cache))
    _check(q, k_cache, v_cache, lengths, starts, block_table, scale)
    wide, k, v, seen = _prepared(q, k_cache, v_cache, lengths, starts, block_table)
    with without_autocast(q):
        return attend(wide, k, v, seen[:, None], scale).to(q.dtype)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor | None, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q and the caches (B, Tmax, K, D) in fp32 or fp64, and the mask of visible places."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (whole_cache(x, table).to(wide) for x in (k, v))
    Tmax = k.shape[1]
    # entries beyond a sequence may be NaN, and NaN times a weight of 0 is NaN
    unused = (torch.arange(Tmax, device=q.device) >= lengths[:, None])[..., None, None]
    k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
    return q.to(wide), k, v, visible_places(q.shape[1], Tmax, lengths, starts)


def visible_places(Tq: int, Tmax: int, lengths: Tensor, starts: Tensor | None) -> Tensor:
    """Builds the mask of cache positions that each query sees: bool (B, Tq, Tmax)."""
    places = torch.arange(Tmax, device=lengths.device)
    last = lengths.clamp(0, Tmax)[:, None] - Tq + torch.arange(Tq, device=lengths.device)
    seen = places <= last[..., None]
    return seen if starts is None else seen & (places >= starts[..., None])


def whole_cache(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """Returns the cache as (B, Tmax, K, D)."""
    if block_table is None:
        return cache
    if not len(cache):
        return cache.new_zeros(len(block_table), 0, *cache.shape[2:])
    return cache[block_table.clamp(0, len(cache) - 1).long()].flatten(1, 2)


def _output(q: Tensor, *_: Any) -> Tensor:
    return like(q)


_decode_attention_fwd = Op(
    "decode_attention_fwd(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, "
    "Tensor? starts, Tensor? block_table, float scale) -> Tensor",
    filled(_output, f"{__package__}.device:decode_attention_fwd"),
    _output,
)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Computes softmax(q k^T * scale + mask) v for the last tokens of each sequence, over its
    cache.

    Query i of a sequence is at position p = length - Tq + i and sees the positions up to p, its own
    included. A query that sees no key gives 0. Entries of the cache beyond a sequence are never
    used. The host never reads the lengths: there is no sync, and one CUDA graph serves all lengths.

    Lengths beyond the cache and entries beyond the pages are clamped to the largest valid value,
    negative ones to 0, so that nothing outside of the caches is read.

    Args:
        q: (B, Tq, H, D), fp32 | fp16 | bf16, D up to 256; under autocast cast to its dtype, as the
            caches are (by a copy, so keep them in that dtype).
        k_cache: (B, Tmax, K, D), dtype of `q`; H is a multiple of K. With a block table (pages,
            page, K, D). Read in place where the last dimension is contiguous.
        v_cache: shape and dtype of `k_cache`.
        lengths: (B,) int32 | int64 on q's device: positions in use, the new tokens' included.
        starts: (B, Tq) int32 | int64: the first position that each query sees, such as the start of
            a window or a document. By default queries see all positions from 0 on.
        block_table: (B, max_pages) int32: position p of sequence b is in page block_table[b, p //
            page], at p % page.
        scale: factor on the scores; D**-0.5 by default.

    Returns:
        Tensor: (B, Tq, H, D), contiguous, dtype of `q`, or autocast's.

    Raises:
        ValueError: an argument is not as above, or a gradient is required: there is none.
    """
    q, k_cache, v_cache = (x.to(autocast_dtype(x)) for x in (q, k_cache, v_cache))
    _check(q, k_cache, v_cache, lengths, starts, block_table, scale)
    check_head("q", q)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: it requires a gradient; detach it or use torch.no_grad(), because "
                "decode_attention has no backward"
            )
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if not runs_kernels(q.device) and is_batch_invariant():
        with without_autocast(q):
            wide = _prepared(q, k_cache, v_cache, lengths, starts, block_table)
            return attention_invariant(*wide, factor).to(q.dtype)
    if not runs_kernels(q.device):
        return decode_attention_ref(
            q, k_cache, v_cache, lengths, starts=starts, block_table=block_table, scale=scale
        )
    return _decode_attention_fwd(q, k_cache, v_cache, lengths, starts, block_table, factor)


def _check(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor | None,
    block_table: Tensor | None, scale: float | None,
) -> None:  # fmt: skip
    check_qkv(q, k, v, names=("k_cache", "v_cache"), paged=block_table is not None)
    B, Tq = q.shape[:2]
    check_like("lengths", lengths, (B,), INTEGERS, q)
    if starts is not None:
        check_like("starts", starts, (B, Tq), INTEGERS, q)
    if block_table is not None:
        if block_table.dim() != 2:
            raise ValueError(
                f"block_table: expected ({B}, max_pages), got {tuple(block_table.shape)}"
            )
        check_like("block_table", block_table, (B, block_table.shape[1]), INTEGERS[:1], q)
    check_scale(scale)
