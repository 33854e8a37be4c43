"""Ops of a model: what each of them computes, whichever implementation is chosen.

Shapes
    B batch, T tokens, C width, H query heads, K key/value heads, D head dim, F feed-forward width,
    V vocabulary
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from fastgpt.ops.kv_cache import Cache


class AttentionOp(Protocol):
    """Causal self-attention of q (B, Tq, H, D) over k and v (B, T, K, D) with K key/value heads.

    The queries are those of the last Tq <= T tokens. Scores are multiplied by `scale`; a query
    attends to the last `window` keys (None: all), its own included, of its own document. `doc_ids`
    (B, T) are equal within a document. The reference is `kernels.attention_ref`.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        dropout_p: float = 0.0,
        doc_ids: Tensor | None = None,
    ) -> Tensor: ...


class PackedAttentionOp(Protocol):
    """`AttentionOp` on one tensor of q, k and v, (B, T, H + 2 K, D) with K key/value heads.

    `heads` is H.

    Its gradient is written into one buffer, which saves the concatenation of three gradients. A
    bias ((H + 2 K) D,) that qkv contains already, and that was detached when it was added, gets its
    gradient as `input_bias`.
    """

    def __call__(
        self,
        qkv: Tensor,
        heads: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        dropout_p: float = 0.0,
        doc_ids: Tensor | None = None,
        input_bias: Tensor | None = None,
    ) -> Tensor: ...


class DecodeOp(Protocol):
    """Attention of a sequence's last T tokens, q (B, T, H, D), over a cache of K key/value heads.

    The result is (B, T, H, D). Keys and values are (B, Tmax, K, D), one layer's part of `cache`,
    which knows the positions: of each row the first `lengths` are in use, and a query attends to
    those from `starts` up to its own, which is what the mask `hidden` says.
    """

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, cache: Cache, *, scale: float | None = None
    ) -> Tensor: ...


RotaryOp: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rotary position embedding (RoPE) of q and k (B, T, heads, D), by cos and sin (T, D/2)."""
NormOp: TypeAlias = Callable[..., Tensor]
"""LayerNorm(x, weight, bias, eps) or RMSNorm(x, weight, eps) of x (..., C) over its last dimension.

RMSNorm: Zhang & Sennrich 2019, arXiv:1910.07467."""
AddNormOp: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""Residual sum and its norm: returns (norm(x + residual), x + residual).

The arguments are x, residual, and the rest of `NormOp`. `input_bias` is a bias that x contains
already and that was detached when it was added: this op computes its gradient."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Implementations of LayerNorm and RMSNorm, alone and after a residual sum."""

    layer_norm: NormOp
    add_layer_norm: AddNormOp
    rms_norm: NormOp
    add_rms_norm: AddNormOp
    fuses_bias_grad: bool
    """True if the ops with a sum compute the gradient of `input_bias` without a pass of its own."""


ActivationOp: TypeAlias = Callable[[Tensor, Tensor | None, str], Tensor]
"""Activation op(x, bias, kind) of x + bias, both (..., F); for SwiGLU x + bias is (..., 2 F)."""
DropoutOp: TypeAlias = Callable[[Tensor, float], Tensor]
"""Zeroes each element of x with probability p, and scales the others by 1 / (1 - p)."""


class LossOp(Protocol):
    """Mean loss in nats, () fp32, of the output head over the targets that are not -100.

    The logits of x (..., C) are x @ weight.T + bias, without the columns from `valid_vocab` on,
    which are padding, and squashed to (-softcap, softcap). A token's loss is
        lse - (1 - label_smoothing) logits[target] - label_smoothing mean(logits) + z_loss lse**2
    where lse = log sum exp(logits), in fp32. It is NaN where every target is -100.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        valid_vocab: int | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """Implementations chosen for a model, and their names."""

    attention: AttentionOp
    attention_packed: PackedAttentionOp | None
    """`attention` for one tensor of q, k and v; None if only separate ones are supported."""
    decode: DecodeOp
    rotary: RotaryOp
    norms: Norms
    activation: ActivationOp | None
    """Fused bias and activation; None for PyTorch's, after a linear layer that adds the bias."""
    loss: LossOp
    dropout: DropoutOp
    names: dict[str, str]
