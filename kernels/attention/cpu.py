"""Causal attention as plain matrix products over blocks of queries, which is fast on a CPU.

A block of queries meets only the keys up to its own end, so about half the square is never
computed, and each block's scores stay in cache. PyTorch's fused CPU attention runs its products at
a tenth of the matmul rate; `python -m bench` measures both.

Shapes
    q, out: (B, Tq, H, D); k, v: (B, T, H, D), the queries being those of the last Tq tokens
    inside: (B*H, Tq or T, D); weights of one block: (B*H, rows, keys)
"""

from typing import Any

import torch
from torch import Tensor

from ..checks import check_qkv
from ..dropout.op import dropout_keep
from .plain import attention_mask


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None,
        dropout_p: float, doc_ids: Tensor | None,
    ) -> Tensor:  # fmt: skip
        (B, Tq, H, D), T = q.shape, k.shape[1]
        before, size = T - Tq, 64 if T <= 512 else 128  # measured
        # (first key, first query, end), positions among the T keys
        ctx.blocks = [
            (0 if window is None else max(0, start - window + 1), start, min(start + size, T))
            for start in range(before, T, size)
        ]
        q, k, v = (x.transpose(1, 2).reshape(B * H, -1, D) for x in (q, k, v))
        out = torch.empty_like(q)
        ctx.scale, ctx.keep_scale = scale, 1.0
        weights, keeps = [], []
        for low, start, end in ctx.blocks:
            documents = None if doc_ids is None else doc_ids[:, low:end]
            mask = attention_mask(
                end - start, end - low, causal=True, window=window, doc_ids=documents
            )
            assert mask is not None
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
            if doc_ids is not None:
                bias = bias.expand(B, H, -1, -1)
            bias = bias.flatten(0, 1)  # (1 or B*H, rows, keys)
            rows = slice(start - before, end - before)
            scores = torch.baddbmm(bias, q[:, rows], k[:, low:end].transpose(1, 2), alpha=scale)
            weight = scores.softmax(-1)
            weights.append(weight)
            if dropout_p:
                keep, ctx.keep_scale = dropout_keep(tuple(weight.shape), dropout_p, weight.dtype)
                keeps.append(keep)
                weight = (weight * keep).mul_(ctx.keep_scale)
            out[:, rows] = torch.bmm(weight, v[:, low:end])
        ctx.save_for_backward(q, k, v, *weights, *keeps)
        return out.view(B, H, Tq, D).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        weights, keeps = saved[: len(ctx.blocks)], saved[len(ctx.blocks) :]
        B, Tq, H, D = dout.shape
        before = k.shape[1] - Tq
        dout = dout.transpose(1, 2).reshape(B * H, Tq, D)
        dq, (dk, dv) = torch.empty_like(q), torch.zeros((2, *k.shape), dtype=k.dtype)
        for i, (low, start, end) in enumerate(ctx.blocks):
            weight, rows = weights[i], slice(start - before, end - before)
            dweight = torch.bmm(dout[:, rows], v[:, low:end].transpose(1, 2))
            dropped = weight
            if keeps:
                dropped = (weight * keeps[i]).mul_(ctx.keep_scale)
                dweight.mul_(keeps[i]).mul_(ctx.keep_scale)
            dv[:, low:end].baddbmm_(dropped.transpose(1, 2), dout[:, rows])
            dscores = torch.ops.aten._softmax_backward_data(dweight, weight, -1, weight.dtype)
            dscores.mul_(ctx.scale)
            dq[:, rows] = torch.bmm(dscores, k[:, low:end])
            dk[:, low:end].baddbmm_(dscores.transpose(1, 2), q[:, rows])
        return *(x.view(B, H, -1, D).transpose(1, 2) for x in (dq, dk, dv)), *(None,) * 4


def attention_blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """Computes causal self-attention on CPU tensors; the result is that of `attention_ref`.

    Args:
        q: (B, Tq, H, D), fp32 | bf16 | fp16, any strides.
        k: (B, T, K, D), dtype of `q`; H is a multiple of K.
        v: (B, T, K, D), dtype of `q`.
        scale: factor on the scores; D**-0.5 by default.
        window: a query sees the last `window` keys only, its own position included.
        dropout_p: probability with which each attention weight is dropped.
        doc_ids: (B, T) integers, non-decreasing in each row; queries see their own document only.

    Returns:
        Tensor: (B, Tq, H, D), dtype of `q`. The weights, about B*H*T*T/2 elements if Tq is T, are
        kept for the backward, and with dropout a mask of the same size and dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or `q` has more tokens than `k`.
    """
    check_qkv(q, k, v)
    if q.shape[1] > k.shape[1]:
        raise ValueError(f"q: expected at most {k.shape[1]} tokens as in k, got {q.shape[1]}")
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _BlockedAttention.apply(q, k, v, scale, window, dropout_p, doc_ids)
