"""Which implementation of each op the model runs: the one place that chooses.

`torch` is the plain form, `sdpa` PyTorch's fused attention, `flash_attn` the package's, `triton`
our kernels, on CUDA (and on CPUs where Triton interprets them, for tests); `blocked` and `lanes`
are for CPUs; `chunked` is for both, with our kernels on CUDA. A name that cannot run on the device
is an error, never a silent fallback; `auto` is resolved once, when the model is built, and the
choice is written to the run's manifest.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt import kernels
from fastgpt.config import OpsConfig
from fastgpt.errors import UserError
from fastgpt.kernels import attention_blocked, attention_ref, dropout, rotary_ref
from fastgpt.kernels.attention.op import attention_mask
from fastgpt.kernels.bias_act.op import ACTIVATIONS
from fastgpt.kernels.runtime import runs_kernels


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    doc_ids: Tensor | None = None,
) -> Tensor:
    """Causal self-attention by F.scaled_dot_product_attention; contract: `attention_ref`."""
    T = q.shape[1]
    mask = None
    if window is not None or doc_ids is not None:
        mask = attention_mask(T, T, causal=True, window=window, doc_ids=doc_ids, device=q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # (B, H, T, D) views, nothing is copied
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    doc_ids: None = None,
) -> Tensor:
    """Causal self-attention by the package flash-attn, bf16 or fp16; contract: `attention_ref`."""
    from flash_attn import flash_attn_func  # pyright: ignore

    seen = (-1, -1) if window is None else (window - 1, 0)  # keys before and after a query's own
    return flash_attn_func(
        q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=True, window_size=seen
    )


def decode_sdpa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`kernels.decode_attention` by F.scaled_dot_product_attention; unused places are finite."""
    keys = torch.arange(k_cache.shape[1], device=q.device)
    places = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
    mask = keys <= places[..., None]  # (B, Tq, Tmax)
    if starts is not None:
        mask = mask & (keys >= starts[..., None])
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        attn_mask=mask[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != k_cache.shape[2],
    )
    return out.transpose(1, 2)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension, by PyTorch; contract: `kernels.layer_norm`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual): a sub-layer's output joins the residual stream."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, by PyTorch; contract: `kernels.rms_norm`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); Zhang & Sennrich 2019, arXiv:1910.07467."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def linear_activation(x: Tensor, linear: nn.Linear, kind: str) -> Tensor:
    """A projection with its bias, then the activation `kind` (`kernels.bias_act`), by PyTorch."""
    return ACTIVATIONS[kind](linear(x))


def linear_bias_act(x: Tensor, linear: nn.Linear, kind: str) -> Tensor:
    """`linear_activation` whose bias is added by the kernel of the activation."""
    return kernels.bias_act(F.linear(x, linear.weight), linear.bias, kind)


def head_logits(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    valid_vocab: int,
    softcap: float | None,
) -> Tensor:
    """Logits (..., valid_vocab) of x (..., C), weight (padded V, C) and bias (padded V,); the
    padding's are cut."""
    logits = F.linear(x, weight, bias)[..., :valid_vocab]
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    valid_vocab: int,
    softcap: float | None = None,
) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not -100, all logits at once.

    The softmax is in fp32; contract: `kernels.linear_cross_entropy`.

    Args:
        x: (B, T, C).
        weight: (padded V, C); rows from `valid_vocab` on take no part.
        targets: (B, T) int64.
        bias: (padded V,).
        valid_vocab: V.
        softcap: see `ModelConfig.softcap`.

    Returns:
        Tensor: () fp32; NaN where every target is -100.
    """
    logits = head_logits(x, weight, bias=bias, valid_vocab=valid_vocab, softcap=softcap)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


ATTENTION = {
    "torch": attention_ref,
    "sdpa": sdpa,
    "blocked": attention_blocked,
    "triton": kernels.attention,
    "flash_attn": flash_attn,
}
LOSS = {"torch": linear_cross_entropy, "chunked": kernels.linear_cross_entropy}
PACKED_ATTENTION = {"triton": kernels.attention_packed}
"""Those that take the packed projection itself, whose gradient then needs no concatenation."""
ROTARY = {"torch": rotary_ref, "triton": kernels.rotary}
ACTIVATION = {"torch": linear_activation, "triton": linear_bias_act}
DECODE = {"torch": decode_sdpa, "triton": kernels.decode_attention}
DROPOUT = {"torch": F.dropout, "lanes": dropout}


@dataclass(frozen=True, slots=True)
class Norms:
    """The two normalisations, alone and after a residual sum."""

    layer_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]


NORMS = {
    "torch": Norms(layer_norm, add_layer_norm, rms_norm, add_rms_norm),
    "triton": Norms(
        kernels.layer_norm, kernels.add_layer_norm, kernels.rms_norm, kernels.add_rms_norm
    ),
}


@dataclass(frozen=True, slots=True)
class Ops:
    """The implementations chosen for the ops that have more than one, and their names."""

    attention: Callable[..., Tensor]
    attention_packed: Callable[..., Tensor] | None
    norms: Norms
    loss: Callable[..., Tensor]
    rotary: Callable[..., tuple[Tensor, Tensor]]
    activation: Callable[[Tensor, nn.Linear, str], Tensor]
    decode: Callable[..., Tensor]
    dropout: Callable[[Tensor, float], Tensor]
    names: dict[str, str]


def select(config: OpsConfig, device: torch.device | str, *, compiled: bool) -> Ops:
    """Resolves `auto` and checks that what was asked for runs on `device`.

    On a CPU the blocked attention and lane dropout are the faster ones (`docs/design.md`); under
    torch.compile they are left to Inductor. Our Triton kernels, which `chunked` launches where they
    run, must be asked for: by a person, or for a run on CUDA by `fastgpt.choose`.
    """
    on_cpu = torch.device(device).type == "cpu"
    fast_cpu = on_cpu and not compiled
    names = {
        "attention": _named(config.attention, "blocked" if fast_cpu else "sdpa"),
        "norm": _named(config.norm, "torch"),
        "loss": _named(config.loss, "torch" if runs_kernels(torch.device(device)) else "chunked"),
        "rotary": _named(config.rotary, "torch"),
        "activation": _named(config.activation, "torch"),
        "decode": _named(config.decode, "torch"),
        "dropout": _named(config.dropout, "lanes" if fast_cpu else "torch"),
    }
    for op, name in names.items():
        if name in ("blocked", "lanes") and not fast_cpu:
            where = "torch.compile" if on_cpu else torch.device(device).type
            raise UserError(
                f"ops.{op} is {name}: it runs on an uncompiled CPU model, not on {where}"
            )
        if name == "triton" and not runs_kernels(torch.device(device)):
            raise UserError(
                f"ops.{op} is triton: it runs on CUDA, not on {torch.device(device).type}"
            )
        if name == "flash_attn" and (on_cpu or importlib.util.find_spec(name) is None):
            raise UserError(
                "ops.attention is flash_attn: it runs on CUDA, with the package flash-attn, "
                + ("not on cpu" if on_cpu else "which is not installed")
            )
    return Ops(
        ATTENTION[names["attention"]],
        PACKED_ATTENTION.get(names["attention"]),
        NORMS[names["norm"]],
        LOSS[names["loss"]],
        ROTARY[names["rotary"]],
        ACTIVATION[names["activation"]],
        DECODE[names["decode"]],
        DROPOUT[names["dropout"]],
        names,
    )


def _named(asked: str, automatic: str) -> str:
    return automatic if asked == "auto" else asked
