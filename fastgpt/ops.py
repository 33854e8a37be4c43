"""Ops of a model: what each computes, its implementations, and the choice between them.

A model calls `self.ops.attention(...)`; the protocols below define what it may rely on. The tables
map the names of `OpsConfig` to functions: `torch` is the plain form, `sdpa` PyTorch's fused
attention, `flash_attn` that of the package flash-attn, `triton` our kernels, on CUDA (and for tests
on CPUs, in Triton's interpreter); `blocked` and `lanes` are for CPUs; `chunked` is for both, with
our kernels on CUDA. A name that cannot run on the device is an error, never a silent fallback;
`auto` is resolved once, when the model is built, and the choice is written to the run's manifest.

Shapes
    B batch, T tokens, C width, H query heads, K key/value heads, D head dim, F feed-forward width,
    V vocabulary
"""

import importlib.util
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt import kernels, torch_ops
from fastgpt.cache import Cache
from fastgpt.config import OpsConfig
from fastgpt.device import kind_of
from fastgpt.errors import UserError
from fastgpt.kernels.runtime import runs_kernels

# --- what each op computes ------------------------------------------------------------------------


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


class RotaryOp(Protocol):
    """Rotary position embedding (RoPE) of q and k (B, T, heads, D), by cos and sin (T, D/2)."""

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


class LayerNormOp(Protocol):
    """LayerNorm of x (..., C) over the last dimension."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...


class AddLayerNormOp(Protocol):
    """Residual sum and its LayerNorm: returns (layer_norm(x + residual), x + residual).

    `input_bias` is a bias that x contains already and that was detached when it was added: this op
    computes its gradient.
    """

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        input_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class RMSNormOp(Protocol):
    """RMSNorm of x (..., C) over the last dimension; Zhang & Sennrich 2019, arXiv:1910.07467."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class AddRMSNormOp(Protocol):
    """Residual sum and its RMSNorm, like `AddLayerNormOp`."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        input_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Norms:
    """Implementations of LayerNorm and RMSNorm, alone and after a residual sum."""

    layer_norm: LayerNormOp
    add_layer_norm: AddLayerNormOp
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    absorb: bool
    """True if the ops with a sum compute the gradient of `input_bias` without a pass of its own."""


class ActivationOp(Protocol):
    """Activation `kind` of x + bias, both (..., F); for SwiGLU x + bias is (..., 2 F)."""

    def __call__(self, x: Tensor, bias: Tensor | None, kind: str) -> Tensor: ...


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


class DropoutOp(Protocol):
    """Zeroes each element of x with probability p, and scales the others by 1 / (1 - p)."""

    def __call__(self, x: Tensor, p: float, /) -> Tensor: ...


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


# --- the choice -----------------------------------------------------------------------------------


def decode_triton(
    q: Tensor, keys: Tensor, values: Tensor, cache: Cache, *, scale: float | None = None
) -> Tensor:
    """`DecodeOp` by our kernels."""
    return kernels.decode_attention(
        q, keys, values, cache.lengths, starts=cache.starts, scale=scale
    )


ATTENTION: dict[str, AttentionOp] = {
    "torch": kernels.attention_ref,
    "sdpa": torch_ops.sdpa,
    "blocked": kernels.attention_blocked,
    "triton": kernels.attention,
    "flash_attn": torch_ops.flash_attn,
}
PACKED_ATTENTION: dict[str, PackedAttentionOp] = {"triton": kernels.attention_packed}
DECODE: dict[str, DecodeOp] = {"torch": torch_ops.decode_sdpa, "triton": decode_triton}
ROTARY: dict[str, RotaryOp] = {"torch": kernels.rotary_ref, "triton": kernels.rotary}
NORMS = {
    "torch": Norms(
        torch_ops.layer_norm,
        torch_ops.after_sum(torch_ops.layer_norm),
        torch_ops.rms_norm,
        torch_ops.after_sum(torch_ops.rms_norm),
        absorb=False,
    ),
    "triton": Norms(
        kernels.layer_norm,
        kernels.add_layer_norm,
        kernels.rms_norm,
        kernels.add_rms_norm,
        absorb=True,
    ),
}
ACTIVATION: dict[str, ActivationOp] = {"triton": kernels.bias_act}
LOSS: dict[str, LossOp] = {
    "torch": torch_ops.linear_cross_entropy,
    "chunked": kernels.linear_cross_entropy,
}
DROPOUT: dict[str, DropoutOp] = {"torch": F.dropout, "lanes": kernels.dropout}


def select(config: OpsConfig, device: torch.device | str, *, compiled: bool) -> Ops:
    """Resolves `auto`, and checks that the implementations asked for run on `device`.

    On a CPU the blocked attention and lane dropout are faster (`docs/design.md`), except under
    torch.compile, where Inductor fuses PyTorch's. `auto` never resolves to our Triton kernels here:
    the user, or `fastgpt.choose` for a run on CUDA, asks for them.
    """
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    fast_cpu = on_cpu and not compiled
    automatic = {
        "attention": "blocked" if fast_cpu else "sdpa",
        "loss": "chunked" if on_cpu and not runs_kernels(device) else "torch",
        "dropout": "lanes" if fast_cpu else "torch",
    }
    names: dict[str, str] = asdict(config)
    for op, name in names.items():
        if name == "auto":
            names[op] = automatic.get(op, "torch")
        if name in ("blocked", "lanes") and not fast_cpu:
            where = "with torch.compile" if on_cpu else f"on {device.type}"
            raise UserError(
                f"--ops.{op} is {name}: it runs on CPUs without torch.compile, not {where}"
            )
        if name == "triton" and not runs_kernels(device):
            where = "cpu" if on_cpu else kind_of(device).name
            raise UserError(f"--ops.{op} is triton: it runs on CUDA, not on {where}")
        if name == "chunked" and device.type not in ("cpu", "cuda"):
            raise UserError(f"--ops.{op} is chunked: expected torch on {kind_of(device).name}")
        if name == "flash_attn" and (on_cpu or importlib.util.find_spec(name) is None):
            raise UserError(
                "--ops.attention is flash_attn: it runs on CUDA, with the package flash-attn, "
                + ("not on cpu" if on_cpu else "which is not installed")
            )
    return Ops(
        attention=ATTENTION[names["attention"]],
        attention_packed=PACKED_ATTENTION.get(names["attention"]),
        decode=DECODE[names["decode"]],
        rotary=ROTARY[names["rotary"]],
        norms=NORMS[names["norm"]],
        activation=ACTIVATION.get(names["activation"]),
        loss=LOSS[names["loss"]],
        dropout=DROPOUT[names["dropout"]],
        names=names,
    )
