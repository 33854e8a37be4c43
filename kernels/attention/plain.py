"""Attention in plain PyTorch: the kernels' options, the mask, and the reference of every kernel.

Shapes
    as in `kernels.attention.op`
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_qkv
from ..runtime import autocast_dtype, without_autocast
from .dropout import attention_dropout_mask, drop_below

LOG2E = math.log2(math.e)


class AttentionOptions(NamedTuple):
    """Options of the attention kernels, tensors first, in the order of the ops' schemas.

    `starts` and `ends` are those of `document_spans`, `seed` is int64 (1,); for the others see
    `kernels.attention`.
    """

    starts: Tensor | None
    ends: Tensor | None
    seed: Tensor | None
    scale: float | None
    causal: bool
    window: int | None
    dropout_p: float

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.starts, self.ends, self.seed

    def scales(self, q: Tensor) -> tuple[float, float]:
        """Returns the scale of the attention scores, for powers of e and for powers of 2."""
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        return scale, scale * LOG2E

    def dropout(self) -> tuple[int, float]:
        """Returns the dropout threshold as a signed 32-bit word, and the factor on kept weights."""
        return drop_below(self.dropout_p), 1 / (1 - self.dropout_p)


def attention_mask(
    Tq: int, Tk: int, *, causal: bool, window: int | None = None, doc_ids: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor | None:  # fmt: skip
    """Builds the attention mask: True where a query sees a key; None if every query sees every key.

    The last query is aligned with the last key: distance = i + Tk - Tq - j, query i and key j.

    Args:
        causal: keep distance >= 0.
        window: keep 0 <= distance < window (implies causal).
        doc_ids: (B, Tk) integers; pairs of different documents are hidden. Queries are the last Tq
            positions.

    Returns:
        Tensor | None: bool (1 or B, 1, Tq, Tk).
    """
    if not causal and window is None and doc_ids is None:
        return None
    queries = torch.arange(Tk - Tq, Tk, device=device)[:, None]
    distance = queries - torch.arange(Tk, device=device)[None, :]
    keep = torch.ones(Tq, Tk, dtype=torch.bool, device=device)
    if causal or window is not None:
        keep = distance >= 0
    if window is not None:
        keep = keep & (distance < window)
    keep = keep[None, None]
    if doc_ids is not None:
        keep = keep & (doc_ids[:, None, Tk - Tq :, None] == doc_ids[:, None, None, :])
    return keep


def attention_ref(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    window: int | None = None, dropout_p: float = 0.0, dropout_mask: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention in plain PyTorch, scores and softmax in fp32: the reference for every kernel.

    Arguments, result and errors are those of `attention`, which draws its mask from a seed; fp64 is
    also accepted and kept.

    Args:
        dropout_mask: bool (B, H, Tq, Tk), True where a weight is kept; drawn at random if None.
    """
    check_qkv(q, k, v)
    Tq, Tk, device = q.shape[1], k.shape[1], q.device
    mask = attention_mask(Tq, Tk, causal=causal, window=window, doc_ids=doc_ids, device=device)
    return attend(q, k, v, mask, scale, dropout_p, dropout_mask)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None,
    dropout_p: float = 0.0, dropout_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes `attention_ref` for the mask of `attention_mask`."""
    (B, Tq, H, D), K = q.shape, k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.to(wide).reshape(B, Tq, K, H // K, D)
    scores = torch.einsum("bqkgd,bjkd->bkgqj", groups, k.to(wide))
    scores = scores * (D**-0.5 if scale is None else scale)
    if mask is None:
        weights = scores.softmax(-1)
    else:
        hidden = ~mask[:, :, None]  # broadcast over the group
        # a finite floor: with -inf the softmax of a row that sees no key is NaN
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights.masked_fill(hidden, 0.0)
    if dropout_mask is None:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    else:
        weights = weights * dropout_mask.view_as(weights) / (1 - dropout_p)
    out = torch.einsum("bkgqj,bjkd->bqkgd", weights, v.to(wide))
    return out.reshape(B, Tq, H, D).to(q.dtype)


def attention_seeded_ref(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`attention_ref` with the mask of a seed and autocast's dtype, as `attention` computes it."""
    q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
    mask = None
    if dropout_seed is not None and dropout_p:
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        mask = attention_dropout_mask(shape, dropout_p, dropout_seed, q.device)
    with without_autocast(q):
        return attention_ref(q, k, v, dropout_p=dropout_p, dropout_mask=mask, **options)
