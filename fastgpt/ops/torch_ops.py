"""Ops of a model by PyTorch and, on CUDA, by the package flash-attn; `fastgpt.ops.tables` chooses.

Shapes
    as in `fastgpt.ops.protocols`, which says what each function computes
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.kernels import decode_attention, is_batch_invariant
from fastgpt.kernels.attention.plain import attention_mask
from fastgpt.kernels.norm.op import residual_sum
from fastgpt.kernels.runtime import without_autocast
from fastgpt.ops.dtensor import all_gather, linear
from fastgpt.ops.kv_cache import Cache


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    doc_ids: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`Ops.attention` by F.scaled_dot_product_attention."""
    Tq, Tk, mask = q.shape[1], k.shape[1], None
    if window is not None or doc_ids is not None or Tq != Tk:
        mask = attention_mask(Tq, Tk, causal=True, window=window, doc_ids=doc_ids, device=q.device)
    return _sdpa(q, k, v, mask, is_causal=mask is None, **options)


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """`Ops.attention` by the package flash-attn, bf16 or fp16; `doc_ids` must be None."""
    from flash_attn import flash_attn_func  # pyright: ignore

    seen = (-1, -1) if window is None else (window - 1, 0)  # keys before and after a query's own
    return flash_attn_func(
        q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=True, window_size=seen
    )


def decode_by_kernels(
    q: Tensor, keys: Tensor, values: Tensor, cache: Cache, *, scale: float | None = None
) -> Tensor:
    """`Ops.decode` by `kernels.decode_attention`."""
    return decode_attention(
        q.to(keys.dtype), keys, values, cache.lengths, starts=cache.starts, scale=scale
    ).to(q.dtype)


def decode_sdpa(
    q: Tensor, keys: Tensor, values: Tensor, cache: Cache, *, scale: float | None = None
) -> Tensor:
    """`Ops.decode` by F.scaled_dot_product_attention; unused positions must be finite."""
    if is_batch_invariant():
        return decode_by_kernels(q, keys, values, cache, scale=scale)
    wide = q.to(keys.dtype)
    with without_autocast(q):  # which would narrow all of them again
        out = _sdpa(wide, keys, values, cache.hidden(wide.dtype)[:, None], scale=scale)
    return out.to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D) views, nothing is copied
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, **options)
    return out.transpose(1, 2)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def after_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a norm after a residual sum, as in `Norms`."""

    def op(
        x: Tensor, residual: Tensor, *weights: Any, x_bias: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        total = residual_sum(x, x_bias, residual)
        return norm(total, *weights, **options), total

    return op


def head_logits(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    valid_vocab: int | None = None,
) -> Tensor:
    """Computes the logits (..., valid_vocab) that `Ops.loss` describes."""
    logits = all_gather(linear(x, weight, bias), weight)[..., :valid_vocab]
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Computes the loss that `Ops.loss` describes from logits (..., V)."""
    logits, targets = logits.float().flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(logits, targets)
    if z_loss:
        scored = targets != -100
        loss = loss + z_loss * (scored * logits.logsumexp(-1).square()).sum() / scored.sum()
    return loss


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, **head: Any
) -> Tensor:
    """`Ops.loss` that computes the logits of all tokens at once, by `head_logits(**head)`."""
    return cross_entropy(head_logits(x, weight, **head), targets, z_loss)
