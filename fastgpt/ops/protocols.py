"""Ops of a model: what each of them computes, whichever implementation is chosen.

Shapes
    B batch, T tokens, C width, H query heads, K key/value heads, D head dim, F feed-forward width,
    V vocabulary
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Op: TypeAlias = Callable[..., Tensor]
PairOp: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Norms:
    """LayerNorm and RMSNorm of x (..., C) over its last dimension, alone and after a residual sum.

    After a sum the arguments are x, residual, weight and so on, and x_bias (C,), the bias of the
    projection that computes x, or None. The result is (norm(total), total) for
    total = x + x_bias + residual.

    Source
        Zhang & Sennrich 2019, arXiv:1910.07467: RMSNorm
    """

    layer_norm: Op
    """op(x, weight, bias, eps)"""
    add_layer_norm: PairOp
    rms_norm: Op
    """op(x, weight, eps)"""
    add_rms_norm: PairOp


@dataclass(frozen=True, slots=True)
class Ops:
    """Implementations chosen for a model, and their names."""

    attention: Op
    """Causal self-attention: op(q, k, v, *, scale=None, window=None, dropout_p=0.0, doc_ids=None).

    The queries (B, Tq, H, D) are those of the last Tq <= T tokens of keys and values (B, T, K, D).
    Scores are multiplied by `scale`; a query attends to the last `window` keys (None: all), its own
    included, of its own document. `doc_ids` (B, T) are equal within a document. The reference is
    `kernels.attention_ref`."""
    attention_packed: Op | None
    """`attention` of one tensor of q, k and v: op(qkv, H, *, ...).

    qkv is (B, T, H + 2 K, D). Its gradient is written into one buffer, which saves the
    concatenation of three gradients. None: only separate tensors are supported."""
    decode: Op
    """Attention of a sequence's last T tokens over a cache: op(q, keys, values, cache, *, scale).

    q is (B, T, H, D), as the result. Keys and values are (B, Tmax, K, D), one layer's part of
    `cache`, which knows the positions: of each row the first `lengths` are in use, and a query
    attends to those from `starts` up to its own, which is what the mask `hidden` says."""
    rotary: PairOp
    """Rotary position embedding (RoPE) of q and k (B, T, heads, D): op(q, k, cos, sin).

    cos and sin are (T, D/2)."""
    norms: Norms
    activation: Op | None
    """Activation of x + bias, both (..., F): op(x, bias, kind); for SwiGLU x + bias is (..., 2 F).

    None: PyTorch's, after a linear layer that adds the bias."""
    loss: Op
    """Mean loss in nats, () fp32, of the output head over the targets that are not -100.

    op(x, weight, targets, *, bias=None, z_loss=0.0, softcap=None, valid_vocab=None). The logits of
    x (..., C) are x @ weight.T + bias, without the columns from `valid_vocab` on, which are
    padding, and squashed to (-softcap, softcap). A token's loss is
        lse - logits[target] + z_loss lse**2
    where lse = log sum exp(logits), in fp32. It is NaN where every target is -100."""
    dropout: Op
    """Zeroes each element of x with probability p, and scales the others by 1 / (1 - p):
    op(x, p)."""
    names: dict[str, str]
