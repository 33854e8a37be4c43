"""Attention: softmax(q k^T * scale + mask) v.

Shapes
    B batch, Tq queries, Tk keys, H query heads, K key/value heads (H a multiple of K), D head dim
    q: (B, Tq, H, D)   k, v: (B, Tk, K, D)   out: (B, Tq, H, D)
Source
    Vaswani et al. 2017, arXiv:1706.03762, eq. 1.  Grouped heads: Ainslie et al. 2023,
    arXiv:2305.13245.
"""

import torch
from torch import Tensor


def attention_mask(
    Tq: int,
    Tk: int,
    *,
    causal: bool,
    window: int | None = None,
    doc_ids: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """Which key each query sees: True where it may look, None where it sees everything.

    The last query stands beside the last key: distance = i + Tk - Tq - j, query i and key j.

    Args:
        Tq: number of queries.
        Tk: number of keys.
        causal: keep distance >= 0.
        window: keep 0 <= distance < window (implies causal).
        doc_ids: (B, Tk) integers; pairs of different documents are hidden. Queries are the last Tq
            places.
        device: where the mask is made.

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
        keep = keep & (doc_ids[:, None, -Tq:, None] == doc_ids[:, None, None, :])
    return keep


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises `ValueError` unless q is (B, Tq, H, D), k and v (B, Tk, K, D), H a multiple of K."""
    if q.dim() != 4:
        raise ValueError(f"q: expected (B, Tq, H, D), got {tuple(q.shape)}")
    B, _, H, D = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[0] != B or x.shape[3] != D or x.shape[1:3] != k.shape[1:3]:
            raise ValueError(
                f"{name}: expected ({B}, Tk, K, {D}) for q {tuple(q.shape)} and the same Tk, K in "
                f"k and v, got {tuple(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name}: expected {q.dtype} on {q.device} as q, got {x.dtype} on {x.device}"
            )
    if k.shape[2] == 0 or H % k.shape[2]:
        raise ValueError(f"q: expected a number of heads that {k.shape[2]} divides, got {H}")


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """Attention in plain PyTorch, scores and softmax in fp32: the contract that every kernel meets.

    A query that sees no key gives output 0 and gradient 0.

    Args:
        q: (B, Tq, H, D), fp32 | fp16 | bf16, any strides.
        k: (B, Tk, K, D), dtype of `q`; H is a multiple of K.
        v: (B, Tk, K, D), dtype of `q`.
        causal: query i sees keys j <= i + Tk - Tq.
        scale: factor on the scores; D**-0.5 by default.
        window: see only the last `window` keys, the query's own place included.
        dropout_p: probability with which each attention weight is dropped.
        doc_ids: (B, Tk) integers, non-decreasing in each row; no look across documents.

    Returns:
        Tensor: (B, Tq, H, D), dtype of `q`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; see `check_qkv`.
    """
    check_qkv(q, k, v)
    B, Tq, H, D = q.shape
    Tk, K = k.shape[1:3]
    factor = D**-0.5 if scale is None else scale
    qf = q.float().unflatten(2, (K, H // K))
    scores = torch.einsum("bqkgd,bjkd->bkgqj", qf, k.float()) * factor
    mask = attention_mask(Tq, Tk, causal=causal, window=window, doc_ids=doc_ids, device=q.device)
    if mask is not None:
        mask = mask[:, :, None]  # broadcast over the group
        # a finite floor, not -inf: a row that sees nothing is NaN in the softmax otherwise
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    out = torch.einsum("bkgqj,bjkd->bqkgd", weights, v.float())
    return out.reshape(B, Tq, H, D).to(q.dtype)
