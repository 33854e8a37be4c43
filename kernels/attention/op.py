"""Attention, softmax(q k^T * scale + mask) v: checks, reference and public functions.

Shapes
    B batch, Tq queries, Tk keys, H query heads, K key/value heads (H a multiple of K), D head dim
    q: (B, Tq, H, D)   k, v: (B, Tk, K, D)   out: (B, Tq, H, D)
Source
    Vaswani et al. 2017, arXiv:1706.03762, eq. 1.  Grouped heads: Ainslie et al. 2023,
    arXiv:2305.13245.  Backward and traffic: docs/kernels/attention.md.

On CUDA, and on CPU tensors in Triton's interpreter, the kernels of `forward` and `backward` run;
anywhere else the plain form does. A gradient of a gradient raises where the
kernels run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import DTYPES, INTEGERS, check_head, check_like, check_qkv, check_scale
from ..runtime import (
    autocast_dtype,
    define_op,
    runs_kernels,
    with_gradient_of,
    without_autocast,
)
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
    """Attention in plain PyTorch, scores and softmax in fp32: the reference for every kernel.

    A query that sees no key gives output 0 and gradient 0.

    Args:
        q: (B, Tq, H, D), fp32 | fp16 | bf16, or fp64, which stays fp64; any strides.
        k: (B, Tk, K, D), dtype of `q`; H is a multiple of K.
        v: (B, Tk, K, D), dtype of `q`.
        causal: query i sees keys j <= i + Tk - Tq.
        scale: factor on the scores; D**-0.5 by default.
        window: a query sees the last `window` keys only, its own position included.
        dropout_p: probability with which each attention weight is dropped.
        dropout_mask: bool (B, H, Tq, Tk), True where a weight is kept; drawn at random if None.
        doc_ids: (B, Tk) integers, non-decreasing in each row; queries see their own document only.

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
        # a finite floor: with -inf the softmax of a row that sees no key is NaN
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


def attention_seeded_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`attention_ref` with the mask of a seed and autocast's dtype, as `attention` computes it."""
    q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
    mask = None
    if dropout_seed is not None and dropout_p:
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        mask = attention_dropout_mask(shape, dropout_p, dropout_seed, q.device)
    with without_autocast(q):
        return attention_ref(q, k, v, dropout_p=dropout_p, dropout_mask=mask, **options)


# --- op -------------------------------------------------------------------------------------------
# Two ops, because of the gradient: `attention` takes three tensors; `attention_packed` takes the
# projection (B, T, H + 2 K, D) they are slices of and returns one gradient for it, written slice by
# slice, and one for a bias in the projection. With `attention` autograd would concatenate three
# gradients, even where q, k and v share a buffer: the split's backward is a node of its own, and an
# op's outputs must not be views of one buffer. The kernels are imported when first run: triton is
# missing on macOS and slow to import.

_OPTIONS = (
    "Tensor? starts, Tensor? ends, Tensor? seed, float? scale, bool causal, SymInt? window, "
    "float dropout_p"
)


def _define(
    name: str, schema: str, tensors: int, split: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Registers an attention op with torch, and `name`_bwd, which computes its gradients.

    After the inputs of `schema` the op takes a bias that they contain, or None. Its values matter
    nowhere; `name`_bwd takes the dtype of its gradient, None if none is wanted.

    Args:
        schema: the inputs: tensors and, where they are packed, the heads of q.
        tensors: how many of these inputs are tensors.
        split: makes views q, k and v of these inputs.
    """
    count = schema.count(",") + 1
    given = ", ".join(schema.split(", ")[:tensors])

    def fwd(*args: Any) -> tuple[Tensor, Tensor]:
        from .forward import Options, attention_fwd

        return attention_fwd(*split(*args[:count]), Options(*args[count + 1 :]))

    def fake_fwd(*args: Any) -> tuple[Tensor, Tensor]:
        q, _, _ = split(*args[:count])
        B, Tq, H, D = q.shape
        return q.new_empty((B, Tq, H, D)), q.new_empty((B, H, Tq), dtype=torch.float32)

    def bwd(dout: Tensor, *args: Any) -> tuple[Tensor, ...]:
        from .backward import attention_bwd
        from .forward import Options

        out, lse, *options, bias_dtype = args[tensors:]
        heads = [out.shape[2]] * (count - tensors)
        *grads, dbias = empty(dout, *args)
        q, k, v = split(*args[:tensors], *heads)
        views = split(*grads, *heads)
        sums = dbias if bias_dtype else None
        attention_bwd(dout, q, k, v, out, lse, Options(*options), views, sums)
        return *grads, dbias

    def empty(dout: Tensor, *args: Any) -> tuple[Tensor, ...]:
        """Makes the gradients of the tensors and of the bias, the last of no elements if unused."""
        inputs, dtype = args[:tensors], args[-1]
        grads = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
        columns = sum(x.shape[2:].numel() for x in inputs) if dtype else 0
        dbias = torch.empty(columns, dtype=dtype or torch.float32, device=dout.device)
        return *grads, dbias

    gradients = define_op(
        f"{name}_bwd(Tensor dout, {given}, Tensor out, Tensor lse, {_OPTIONS}, "
        f"ScalarType? bias_dtype) -> ({', '.join(['Tensor'] * (tensors + 1))})",
        bwd,
        empty,
    )

    def save(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        bias, starts, ends, seed, *ctx.settings = args[count:]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*args[:tensors], *output, starts, ends, seed)
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * (count + 8)
        dtype = ctx.bias_dtype if ctx.needs_input_grad[count] else None
        *grads, dbias = gradients(dout, *ctx.saved_tensors, *ctx.settings, dtype)
        rest = (None,) * (count - tensors)
        return *grads, *rest, dbias if dtype else None, *(None,) * 7

    return define_op(
        f"{name}({schema}, Tensor? bias, {_OPTIONS}) -> (Tensor, Tensor)",
        fwd,
        fake_fwd,
        setup_context=save,
        backward=backward,
    )


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    K = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.split((heads, K, K), dim=2)
    return q, k, v


_attention = _define("attention", "Tensor q, Tensor k, Tensor v", 3, lambda q, k, v: (q, k, v))
_attention_packed = _define("attention_packed", "Tensor qkv, SymInt heads", 1, _split)


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
    settings = (causal, scale, window, dropout_p, dropout_seed, doc_ids)
    return _attend(_attention, (q, k, v), (q, k, v), None, *settings)


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
    input_bias: Tensor | None = None,
) -> Tensor:
    """Computes `attention` for q, k and v in one tensor, whose gradient needs no concatenation.

    The options are those of `attention`, and `input_bias`.

    Args:
        qkv: (B, T, H + 2 K, D): the heads of q, then of k, then of v.
        heads: number of query heads, H.
        input_bias: ((H + 2 K) D,), fp32 | fp16 | bf16; a bias that `qkv` contains already, put
            there with its gradient cut off. It changes no result; it gets the column sums of qkv's
            gradient, which cost no pass of their own here.

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
    settings = (causal, scale, window, dropout_p, dropout_seed, doc_ids)
    if input_bias is not None:
        check_like("input_bias", input_bias, (qkv.shape[2:].numel(),), DTYPES, qkv, "qkv")
        if not runs_kernels(qkv.device) or (scale is not None and scale <= 0):
            qkv = with_gradient_of(input_bias, qkv.flatten(2)).view(qkv.shape)
            input_bias = None
    return _attend(_attention_packed, (qkv, heads), _split(qkv, heads), input_bias, *settings)


def _attend(
    op: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Any, ...],
    qkv: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    window: int | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    doc_ids: Tensor | None,
) -> Tensor:
    """Checks the arguments of attention and calls the registered op."""
    q, k, v = qkv
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

    seed = _seed(q, dropout_p, dropout_seed)
    if not runs_kernels(q.device):
        return attention_seeded_ref(
            q, k, v, causal=causal, scale=scale, window=window, dropout_p=dropout_p,
            dropout_seed=seed, doc_ids=doc_ids,
        )  # fmt: skip
    if scale is not None and scale <= 0:  # the kernels scale after the maximum
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
        op, inputs = _attention, (q, k, v)
    return op(*inputs, bias, *document_spans(doc_ids), seed, scale, causal, window, dropout_p)[0]


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
