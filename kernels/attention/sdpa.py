"""Attention with the signature and layout of PyTorch's scaled_dot_product_attention.

Shapes
    query: (B, H, Tq, D)   key, value: (B, K, Tk, D)   out: (B, H, Tq, D)
"""

import math

import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..checks import DTYPES, MAX_D
from ..runtime import runs_kernels
from .op import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes what torch.nn.functional.scaled_dot_product_attention does, by our kernels if they
    can.

    They cannot, and PyTorch's function is called: with a mask; causal with Tq != Tk, which PyTorch
    aligns at the first key; on a device where no kernels run; for other dtypes, D above 256, other
    shapes than these (broadcast, empty, a value of another width) and dropout_p = 1. Dropout draws
    other random numbers than PyTorch's. A gradient of a gradient raises where the kernels run.

    Args:
        query: (B, H, Tq, D); `kernels.attention` takes (B, Tq, H, D) instead.
        key: (B, K, Tk, D), dtype of `query`; K is H, or with `enable_gqa` divides it.
        value: shape and dtype of `key`.
        attn_mask: see PyTorch's, as `dropout_p`, `is_causal`, `scale` (D**-0.5 by default).
        enable_gqa: allows fewer key/value heads than query heads.

    Returns:
        Tensor: (B, H, Tq, D), dtype of `query`, or autocast's.

    Raises:
        RuntimeError: what PyTorch's function raises for arguments that do not fit.
    """
    square = not is_causal or query.shape[-2] == key.shape[-2]
    plain = attn_mask is None and 0 <= dropout_p < 1 and math.isfinite(scale or 0)
    if not (square and plain and _fits(query, key, value, enable_gqa)):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(q, k, v, causal=is_causal, scale=scale, dropout_p=dropout_p)
    return out.transpose(1, 2)


def _fits(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> bool:
    """Returns True if the kernels take tensors of these shapes, dtypes and devices."""
    if not query.dim() == key.dim() == 4 or not query.numel() or not key.numel():
        return False
    uniform = all((x.dtype, x.device) == (query.dtype, query.device) for x in (key, value))
    (B, H, _, D), K = query.shape, key.shape[1]
    heads = H % K == 0 if grouped else H == K
    shapes = key.shape == value.shape and (key.shape[0], key.shape[3]) == (B, D) and D <= MAX_D
    return uniform and shapes and heads and query.dtype in DTYPES and runs_kernels(query.device)
