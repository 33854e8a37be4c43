"""Attention: softmax(q k^T * scale + mask) v.

Shapes
    B batch, Tq queries, Tk keys, H query heads, K key/value heads (H a multiple of K), D head dim
    q: (B, Tq, H, D)   k, v: (B, Tk, K, D)   out: (B, Tq, H, D)
Source
    Vaswani et al. 2017, arXiv:1706.03762, eq. 1.  Grouped heads: Ainslie et al. 2023,
    arXiv:2305.13245.  Backward and traffic: docs/kernels.md.

On CUDA, and on CPU tensors in Triton's interpreter, the kernels of `forward` and `backward` run;
anywhere else the plain form does. A gradient of a gradient raises where the
kernels run.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import DTYPES, INTEGERS, MAX_D, check_like
from ..runtime import autocast_dtype, define_op, runs_kernels
from .dropout import attention_dropout_mask


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
        keep = keep & (doc_ids[:, None, Tk - Tq :, None] == doc_ids[:, None, None, :])
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
    dropout_mask: Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """Attention in plain PyTorch, scores and softmax in fp32: the contract that every kernel meets.

    A query that sees no key gives output 0 and gradient 0.

    Args:
        q: (B, Tq, H, D), fp32 | fp16 | bf16, or fp64, which stays fp64; any strides.
        k: (B, Tk, K, D), dtype of `q`; H is a multiple of K.
        v: (B, Tk, K, D), dtype of `q`.
        causal: query i sees keys j <= i + Tk - Tq.
        scale: factor on the scores; D**-0.5 by default.
        window: see only the last `window` keys, the query's own place included.
        dropout_p: probability with which each attention weight is dropped.
        dropout_mask: bool (B, H, Tq, Tk), True where a weight is kept; drawn if not given.
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
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.to(wide).reshape(B, Tq, K, H // K, D)
    scores = torch.einsum("bqkgd,bjkd->bkgqj", groups, k.to(wide)) * factor
    mask = attention_mask(Tq, Tk, causal=causal, window=window, doc_ids=doc_ids, device=q.device)
    if mask is not None:
        mask = mask[:, :, None]  # broadcast over the group
        # a finite floor, not -inf: a row that sees nothing is NaN in the softmax otherwise
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    if dropout_mask is None:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    else:
        weights = weights * dropout_mask.view_as(weights) / (1 - dropout_p)
    out = torch.einsum("bkgqj,bjkd->bqkgd", weights, v.to(wide))
    return out.reshape(B, Tq, H, D).to(q.dtype)


# --- op -------------------------------------------------------------------------------------------
# Two ops, because of the gradient: `attention` takes q, k and v apart; `attention_packed` takes the
# projection (B, T, H + 2 K, D) they are slices of and returns one gradient for it, written slice by
# slice. With separate ones autograd would concatenate three gradients, even where q, k and v share
# a buffer: the split's backward is a node of its own, and an op's outputs must not be views of one
# buffer. The kernels are imported when first run: triton is missing on macOS and slow to import.

_OPTIONS = (
    "Tensor? starts, Tensor? ends, Tensor? seed, float? scale, bool causal, SymInt? window, "
    "float dropout_p"
)


def _fwd(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    from .launch import Options, attention_fwd

    return attention_fwd(q, k, v, Options(*options))


def _bwd(
    dout: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor,
    options: tuple[Any, ...], grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    from .launch import Options, attention_bwd

    attention_bwd(dout, *qkv, out, lse, Options(*options), grads)


def _fake_fwd(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, Tq, H, D = q.shape
    return q.new_empty((B, Tq, H, D)), q.new_empty((B, H, Tq), dtype=torch.float32)


def _separate_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _bwd(dout, (q, k, v), out, lse, options, (dq, dk, dv))
    return dq, dk, dv


def _fake_separate_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


_attention_bwd = define_op(
    "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _separate_bwd,
    _fake_separate_bwd,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Tensors of any count first, then starts, ends, seed and the four settings."""
    *tensors, starts, ends, seed, scale, causal, window, dropout_p = inputs
    ctx.save_for_backward(*tensors, *output, starts, ends, seed)
    ctx.settings = (scale, causal, window, dropout_p)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 10
    return *_attention_bwd(dout, *ctx.saved_tensors, *ctx.settings), *(None,) * 7


_attention = define_op(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _fwd,
    _fake_fwd,
    setup_context=_save,
    backward=_backward,
)


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    K = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.split((heads, K, K), dim=2)
    return q, k, v


def _packed_fwd(qkv: Tensor, heads: int, *options: Any) -> tuple[Tensor, Tensor]:
    return _fwd(*_split(qkv, heads), *options)


def _fake_packed_fwd(qkv: Tensor, heads: int, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_fwd(qkv[:, :, :heads])


def _packed_bwd(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *options: Any) -> Tensor:
    heads = out.shape[2]
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    _bwd(dout, _split(qkv, heads), out, lse, options, _split(dqkv, heads))
    return dqkv


_attention_packed_bwd = define_op(
    f"attention_packed_bwd(Tensor dout, Tensor qkv, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor",
    _packed_bwd,
    lambda dout, qkv, *_: qkv.new_empty(qkv.shape),
)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, _, *options = inputs
    _save(ctx, (qkv, *options), output)


def _packed_backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 9
    return _attention_packed_bwd(dout, *ctx.saved_tensors, *ctx.settings), *(None,) * 8


_attention_packed = define_op(
    f"attention_packed(Tensor qkv, SymInt heads, {_OPTIONS}) -> (Tensor, Tensor)",
    _packed_fwd,
    _fake_packed_fwd,
    setup_context=_save_packed,
    backward=_packed_backward,
)


# --- public ---------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale + mask) v by fused kernels; the contract is `attention_ref`'s.

    Scores and weights are never stored: beside the output, one fp32 number a query is. The last
    query stands beside the last key. A query that sees no key gives output 0 and gradient 0. The
    same input gives the same bits, gradients included.

    Args:
        q: (B, Tq, H, D), fp32 | fp16 | bf16, D up to 256; any strides, read in place where the last
            dimension is contiguous. Under autocast q, k and v are cast.
        k: (B, Tk, K, D), dtype of `q`; H is a multiple of K.
        v: (B, Tk, K, D), dtype of `q`.
        causal: query i sees keys j <= i + Tk - Tq.
        scale: factor on the scores; D**-0.5 by default.
        window: keep 0 <= i + Tk - Tq - j < window (implies causal).
        dropout_p: probability with which each attention weight is dropped, in [0, 1).
        dropout_seed: the mask is `attention_dropout_mask`'s for this seed; an int, or int64 (1,) on
            q's device. Drawn on the device, from PyTorch's generator, if not given.
        doc_ids: (B, Tk) int32 or int64, non-decreasing in each row (not checked: that would wait
            for the device); no look across documents. Queries are the last Tq <= Tk places.

    Returns:
        Tensor: (B, Tq, H, D), contiguous, dtype of `q`, or autocast's.

    Raises:
        ValueError: an argument is not as above.
    """
    q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
    check_qkv(q, k, v)
    _check(q, k.shape[1], scale, window, dropout_p, dropout_seed, doc_ids)
    seed = _seed(q, dropout_p, dropout_seed)
    if not runs_kernels(q.device):
        return _plain(q, k, v, causal, scale, window, dropout_p, seed, doc_ids)
    if scale is not None and scale <= 0:  # the kernels take the maximum before they scale
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    spans = document_spans(doc_ids)
    return _attention(q, k, v, *spans, seed, scale, causal, window, dropout_p)[0]


def attention_packed(
    qkv: Tensor,
    heads: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """`attention` of the three slices of one projection, whose gradient needs no concatenation.

    Args:
        qkv: (B, T, H + 2 K, D): the heads of q, then of k, then of v.
        heads: H.
        causal: as for `attention`, like all that follow.
        scale: factor on the scores.
        window: of keys.
        dropout_p: of the weights.
        dropout_seed: of the mask.
        doc_ids: (B, T).

    Returns:
        Tensor: (B, T, H, D), contiguous, dtype of `qkv`, or autocast's.

    Raises:
        ValueError: an argument is not as above.
    """
    if qkv.dim() != 4 or not 0 < heads < qkv.shape[2] or (qkv.shape[2] - heads) % 2:
        raise ValueError(
            f"qkv: expected (B, T, {heads} + 2 K, D) for {heads} heads, got {tuple(qkv.shape)}"
        )
    qkv = qkv.to(autocast_dtype(qkv))
    K = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.split((heads, K, K), dim=2)
    check_qkv(q, k, v)
    _check(q, k.shape[1], scale, window, dropout_p, dropout_seed, doc_ids)
    seed = _seed(q, dropout_p, dropout_seed)
    if not runs_kernels(qkv.device):
        return _plain(q, k, v, causal, scale, window, dropout_p, seed, doc_ids)
    if scale is not None and scale <= 0:
        return attention(
            q, k, v, causal=causal, scale=scale, window=window, dropout_p=dropout_p,
            dropout_seed=seed, doc_ids=doc_ids,
        )  # fmt: skip
    spans = document_spans(doc_ids)
    return _attention_packed(qkv, heads, *spans, seed, scale, causal, window, dropout_p)[0]


def _check(
    q: Tensor,
    Tk: int,
    scale: float | None,
    window: int | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    doc_ids: Tensor | None,
) -> None:
    D = q.shape[3]
    if q.dtype not in DTYPES:
        raise ValueError(f"q: expected fp32, fp16 or bf16, got {q.dtype}")
    if not 1 <= D <= MAX_D:
        raise ValueError(f"q: expected a head dimension from 1 to {MAX_D}, got {D}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected 1 or more, got {window}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected 0 <= p < 1, got {dropout_p}")
    if isinstance(dropout_seed, Tensor):
        check_like("dropout_seed", dropout_seed, (1,), (torch.int64,), q)
    elif dropout_seed is not None and not -(2**63) <= dropout_seed < 2**63:
        raise ValueError(f"dropout_seed: expected 64 bits with a sign, got {dropout_seed}")
    if doc_ids is not None:
        check_like("doc_ids", doc_ids, (q.shape[0], Tk), INTEGERS, q)
        if q.shape[1] > Tk:
            raise ValueError(f"doc_ids: expected at most {Tk} queries, got {q.shape[1]}")


def _seed(q: Tensor, dropout_p: float, dropout_seed: int | Tensor | None) -> Tensor | None:
    """The seed on q's device, drawn or filled in there: nothing is copied and nothing waits."""
    if dropout_p == 0:
        return None
    if dropout_seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    if isinstance(dropout_seed, Tensor):
        return dropout_seed
    return torch.full((1,), dropout_seed, dtype=torch.int64, device=q.device)


def document_spans(doc_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """First and one past the last place of each place's document, (B, Tk) int32 each.

    Outside the op on purpose: torch.compile then finds them once for all layers.
    """
    if doc_ids is None:
        return None, None
    doc_ids = doc_ids.contiguous()
    starts = torch.searchsorted(doc_ids, doc_ids, out_int32=True)
    return starts, torch.searchsorted(doc_ids, doc_ids, right=True, out_int32=True)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    dropout_p: float,
    seed: Tensor | None,
    doc_ids: Tensor | None,
) -> Tensor:
    mask = None
    if seed is not None:
        B, Tq, H, _ = q.shape
        mask = attention_dropout_mask((B, H, Tq, k.shape[1]), dropout_p, seed, q.device)
    with torch.autocast(q.device.type, enabled=False):
        return attention_ref(
            q, k, v, causal=causal, scale=scale, window=window, dropout_p=dropout_p,
            dropout_mask=mask, doc_ids=doc_ids,
        )  # fmt: skip
