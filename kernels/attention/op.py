"""Attention, softmax(q k^T * scale + mask) v: ops, checks and public functions.

Shapes
    B batch, Tq queries, Tk keys, H query heads, K key/value heads (H a multiple of K), D head dim
    q: (B, Tq, H, D)   k, v: (B, Tk, K, D)   out: (B, Tq, H, D)
Source
    Vaswani et al. 2017, arXiv:1706.03762, eq. 1.  Grouped heads: Ainslie et al. 2023,
    arXiv:2305.13245.  Backward and traffic: docs/kernels/attention.md.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks import INTEGERS, check_head, check_like, check_qkv, check_scale
from ..runtime import Op, autocast_dtype, like, runs_kernels
from .plain import AttentionOptions, attention_seeded_ref

# --- ops ------------------------------------------------------------------------------------------
# The kernels are imported when first run: triton is missing on macOS and slow to import.

OPTIONS = (
    "Tensor? starts, Tensor? ends, Tensor? seed, float? scale, bool causal, SymInt? window, "
    "float dropout_p"
)
"""The fields of `AttentionOptions` in the form of an op schema."""
Parts = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients."""


def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates out and lse."""
    B, Tq, H = q.shape[:3]
    return like(q), torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)


def _fwd(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    from .forward import attention_fwd

    out, lse = _outputs(q)
    attention_fwd(q, k, v, AttentionOptions(*options), out, lse)
    return out, lse


def _grads(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Parts:
    return like(q), like(k), like(v)


def _bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> Parts:
    from .backward import attention_bwd

    grads = _grads(dout, q, k, v)
    attention_bwd(dout, q, k, v, out, lse, AttentionOptions(*options), grads)
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], first: int) -> None:
    """Saves the tensors of a forward, whose inputs from `first` on are the options."""
    tensors = [x for x in inputs[:first] if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors, *output, *inputs[first : first + 3])
    ctx.settings = inputs[first + 3 :]
    ctx.mark_non_differentiable(output[1])


_attention_bwd = Op(
    "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _bwd,
    _grads,
)
_attention_fwd = Op(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)",
    _fwd,
    _outputs,
    setup_context=partial(_save, first=3),
    backward=lambda ctx, dout, _: _attention_bwd(dout, *ctx.saved_tensors, *ctx.settings),
)

# --- the packed op --------------------------------------------------------------------------------
# It is an op of its own because of the gradient: it takes the projection (B, T, H + 2 K, D) that q,
# k and v are slices of and returns one gradient for it, written slice by slice. With `attention`
# autograd would concatenate three gradients, even where q, k and v share a buffer: the split's
# backward is a node of its own, and an op's outputs must not be views of one buffer.


def _split(qkv: Tensor, heads: int) -> Parts:
    K = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.split((heads, K, K), dim=2)
    return q, k, v


def _packed_bwd(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *options: Any) -> Tensor:
    from .backward import attention_bwd

    dqkv, heads = like(qkv), out.shape[2]
    grads = _split(dqkv, heads)
    attention_bwd(dout, *_split(qkv, heads), out, lse, AttentionOptions(*options), grads)
    return dqkv


_attention_packed_bwd = Op(
    f"attention_packed_bwd(Tensor dout, Tensor qkv, Tensor out, Tensor lse, {OPTIONS}) -> Tensor",
    _packed_bwd,
    lambda dout, qkv, *_: like(qkv),
)
_attention_packed_fwd = Op(
    f"attention_packed_fwd(Tensor qkv, SymInt heads, {OPTIONS}) -> (Tensor, Tensor)",
    lambda qkv, heads, *options: _fwd(*_split(qkv, heads), *options),
    lambda qkv, heads, *_: _outputs(_split(qkv, heads)[0]),
    setup_context=partial(_save, first=2),
    backward=lambda ctx, dout, _: (_attention_packed_bwd(dout, *ctx.saved_tensors, *ctx.settings),),
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
    """Computes softmax(q k^T * scale + mask) v with fused kernels; `attention_ref` is its
    reference.

    Scores and weights are never stored: apart from the output, it stores one fp32 number for each
    query. The last query is aligned with the last key. A query that sees no key gives output 0 and
    gradient 0. The same input gives the same bits, gradients included.

    Heads come after tokens here, (B, T, H, D), as a projection gives them. In PyTorch they come
    first, (B, H, T, D): for that layout there is `scaled_dot_product_attention`. Tensors in the
    wrong layout are refused where they cannot be meant, but if q, k and v have one shape, nothing
    tells T from H.

    Args:
        q: (B, Tq, H, D), fp32 | fp16 | bf16, D up to 256; any strides, read in place where the last
            dimension is contiguous. Under autocast q, k and v are cast.
        k: (B, Tk, K, D), dtype of `q`; H is a multiple of K.
        v: (B, Tk, K, D), dtype of `q`.
        causal: query i sees keys j <= i + Tk - Tq.
        scale: factor on the scores; D**-0.5 by default.
        window: keep 0 <= i + Tk - Tq - j < window (implies causal).
        dropout_p: probability with which each attention weight is dropped, in [0, 1).
        dropout_seed: seed of the mask, see `attention_dropout_mask`; an int, or int64 (1,) on q's
            device. If None, one is drawn on the device from PyTorch's generator.
        doc_ids: (B, Tk) int32 or int64, non-decreasing in each row (not checked, because that would
            need a host sync); queries see their own document only. Queries are the last Tq <= Tk
            positions.

    Returns:
        Tensor: (B, Tq, H, D), contiguous, dtype of `q`, or autocast's.

    Raises:
        ValueError: an argument is not as above.
    """
    q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
    _check(q, k, v, scale, window, dropout_p, dropout_seed, doc_ids)
    seed = _seed(q, dropout_p, dropout_seed)
    if not runs_kernels(q.device):
        return attention_seeded_ref(
            q, k, v, causal=causal, scale=scale, window=window, dropout_p=dropout_p,
            dropout_seed=seed, doc_ids=doc_ids,
        )  # fmt: skip
    if scale is not None and scale <= 0:  # the kernels scale after the maximum
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    options = AttentionOptions(*document_spans(doc_ids), seed, scale, causal, window, dropout_p)
    out, _ = _attention_fwd(q, k, v, *options)
    return out


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
    """Computes `attention` for q, k and v in one tensor, whose gradient needs no concatenation.

    The options are those of `attention`.

    Args:
        qkv: (B, T, H + 2 K, D): the heads of q, then of k, then of v.
        heads: number of query heads, H.

    Returns:
        Tensor: (B, T, H, D), contiguous, dtype of `qkv`, or autocast's.

    Raises:
        ValueError: an argument is not as above.
    """
    qkv = qkv.to(autocast_dtype(qkv))
    if qkv.dim() != 4 or not 0 < heads < qkv.shape[2] or (qkv.shape[2] - heads) % 2:
        raise ValueError(
            f"qkv: expected (B, T, {heads} + 2 K, D) for {heads} heads, got {tuple(qkv.shape)}"
        )
    check_head("qkv", qkv)
    if not runs_kernels(qkv.device) or (scale is not None and scale <= 0):
        return attention(
            *_split(qkv, heads), causal=causal, scale=scale, window=window, dropout_p=dropout_p,
            dropout_seed=dropout_seed, doc_ids=doc_ids,
        )  # fmt: skip
    q, k, v = _split(qkv, heads)
    _check(q, k, v, scale, window, dropout_p, dropout_seed, doc_ids)
    seed = _seed(q, dropout_p, dropout_seed)
    options = AttentionOptions(*document_spans(doc_ids), seed, scale, causal, window, dropout_p)
    out, _ = _attention_packed_fwd(qkv, heads, *options)
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, dropout_p: float,
    dropout_seed: int | Tensor | None, doc_ids: Tensor | None,
) -> None:  # fmt: skip
    check_qkv(q, k, v)
    check_head("q", q)
    check_scale(scale)
    if window is not None and window < 1:
        raise ValueError(f"window: expected 1 or more, got {window}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected 0 <= p < 1, got {dropout_p}")
    if isinstance(dropout_seed, Tensor):
        check_like("dropout_seed", dropout_seed, (1,), (torch.int64,), q)
    elif dropout_seed is not None and not -(2**63) <= dropout_seed < 2**63:
        raise ValueError(f"dropout_seed: expected signed 64 bits, got {dropout_seed}")
    if doc_ids is not None:
        check_like("doc_ids", doc_ids, tuple(k.shape[:2]), INTEGERS, q)
        if q.shape[1] > k.shape[1]:
            raise ValueError(f"q: expected at most {k.shape[1]} tokens (doc_ids), got {q.shape[1]}")


def _seed(q: Tensor, dropout_p: float, dropout_seed: int | Tensor | None) -> Tensor | None:
    """Returns the seed on q's device, drawn or filled in there, without a copy or a host sync."""
    if dropout_p == 0:
        return None
    if dropout_seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    if isinstance(dropout_seed, Tensor):
        return dropout_seed
    return torch.full((1,), dropout_seed, dtype=torch.int64, device=q.device)


def document_spans(doc_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Finds where the document of each position starts and ends (exclusive), (B, Tk) int32 each.

    This stays outside the op so that torch.compile computes it once for all layers.
    """
    if doc_ids is None:
        return None, None
    doc_ids = doc_ids.contiguous()
    starts = torch.searchsorted(doc_ids, doc_ids, out_int32=True)
    return starts, torch.searchsorted(doc_ids, doc_ids, right=True, out_int32=True)
