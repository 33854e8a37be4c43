"""Attention's launchers: what is allocated, which configuration runs, on how many programs.

Shapes
    as in attention_fwd
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import padded
from ..runtime import INTERPRETING, arch, launch
from .backward import _attention_bwd_dkv_kernel, _attention_bwd_dq_kernel
from .config import config
from .dropout import drop_below
from .forward import _attention_fwd_kernel

LOG2E = math.log2(math.e)
L2_BYTES = 32 << 20  # for the keys and values in flight; an A100 has 40 MB, an H100 50 MB


class Options(NamedTuple):
    """What the ops take beside tensors of numbers; see `kernels.attention.attention`."""

    starts: Tensor | None
    ends: Tensor | None
    seed: Tensor | None
    scale: float | None
    causal: bool
    window: int | None
    dropout_p: float

    def scales(self, q: Tensor) -> tuple[float, float]:
        """The factor on the scores, and the same for powers of 2."""
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        return scale, scale * LOG2E

    def dropout(self) -> tuple[int, float]:
        """The least signed word that is kept, and 1 / the share that is kept."""
        return drop_below(self.dropout_p), 1 / (1 - self.dropout_p)


# --- launchers ------------------------------------------------------------------------------------


def _tokens(x: Tensor) -> Tensor:
    """`x` (B, T, H, D) as the kernels can read it: itself, but for layouts hardly ever met.

    The last dimension must be contiguous; within a tile rows are addressed in 32 bits.
    """
    return x if x.stride(3) == 1 and x.stride(1) < 1 << 22 else x.contiguous()


def _meta(q: Tensor, k: Tensor, options: Options) -> dict[str, Any]:
    """The constexprs that all kernels share."""
    H, D = q.shape[2:]
    window = options.window
    return {
        "H": H,
        "GROUP": H // k.shape[2],
        "D": D,
        "BLOCK_D": padded(D),
        "CAUSAL": options.causal or window is not None,
        "WINDOW": window is not None and window < k.shape[1],
        "DOCS": options.starts is not None,
        "DROPOUT": options.dropout_p > 0,
    }


def _together(x: Tensor, heads_each: float, num_heads: int) -> int:
    """How many heads take turns: a power of two whose two (T, D) tensors fit into the L2 cache."""
    each = 2 * x.shape[1] * x.shape[3] * x.element_size() * heads_each
    return min(num_heads, 1 << max(0, math.floor(math.log2(L2_BYTES / each))))


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse): lse (B, H, Tq) is log2 of the sum of exp(scores), +inf where nothing is seen."""
    (B, Tq, H, D), Tk = q.shape, k.shape[1]
    out = torch.empty((B, Tq, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if Tk == 0:
        return out.zero_(), lse.fill_(math.inf)
    if INTERPRETING and q.dtype is torch.bfloat16:  # its bf16 products are wrong
        y, lse = attention_fwd(q.float(), k.float(), v.float(), options)
        return y.bfloat16(), lse
    q, k, v = _tokens(q), _tokens(k), _tokens(v)
    meta = _meta(q, k, options)
    meta |= config("fwd", q, meta, arch(q.device))
    launch(
        _attention_fwd_kernel, (-(-Tq // meta["BLOCK_M"]) * B * H,),
        q, k, v, out, lse, *options[:3],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        Tq, Tk, B * H, _together(k, 1 / meta["GROUP"], B * H), options.window or 0,
        options.scales(q)[1], *options.dropout(), **meta,
    )  # fmt: skip
    return out, lse


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options,
    grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Writes dq, dk and dv into `grads`: tensors or views in which heads lie D apart."""
    (B, Tq, H, D), (Tk, K) = q.shape, k.shape[1:3]
    if B * Tq * Tk * H * D == 0:
        for x in grads:
            x.zero_()
        return
    if INTERPRETING and q.dtype is torch.bfloat16:
        wide = tuple(x.float().contiguous() for x in grads)
        attention_bwd(
            dout.float(), q.float(), k.float(), v.float(), out.float(), lse, options, wide
        )
        for x, y in zip(grads, wide, strict=True):
            x.copy_(y)
        return
    dq, dk, dv = grads
    assert dk.stride() == dv.stride()
    assert dq.stride(2) == dk.stride(2) == D
    q, k, v, dout = _tokens(q), _tokens(k), _tokens(v), _tokens(dout)
    delta = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    common = _meta(q, k, options)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    scalars = (options.window or 0, *options.scales(q), *options.dropout())
    meta = common | config("dq", q, common, arch(q.device))
    launch(
        _attention_bwd_dq_kernel, (-(-Tq // meta["BLOCK_M"]) * B * H,),
        q, k, v, out, dout, dq, lse, delta, *options[:3],
        *strides, *dq.stride()[:2],
        Tq, Tk, B * H, _together(k, 1 / meta["GROUP"], B * H), *scalars, **meta,
    )  # fmt: skip
    meta = common | config("dkv", q, common, arch(q.device))
    launch(
        _attention_bwd_dkv_kernel, (-(-Tk // meta["BLOCK_N"]) * B * K,),
        q, k, v, dout, dk, dv, lse, delta, *options[:3],
        *strides, *dk.stride()[:2],
        Tq, Tk, B * K, _together(q, meta["GROUP"], B * K), *scalars, **meta,
    )  # fmt: skip
