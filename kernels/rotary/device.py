"""Triton kernels for rotary positions, which rotate every pair of numbers of q and of k.

Shapes
    B = batch, T = tokens, H and K = heads of q and of k, D = head dimension, HALF = D / 2 pairs
    q, q_out: (B, T, H, D)   k, k_out: (B, T, K, D)   cos, sin: (T, HALF) fp32

A program rotates a block of tokens in a block of heads, so that the heads share the loads of cos
and sin. The heads of k follow those of q in the grid: one launch. The backward is the same with the
angles negated (CONJUGATE).
"""

import triton
import triton.language as tl
from torch import Tensor

from ..runtime import launch


@triton.jit
def _turn(
    x_ptr, out_ptr, cos, sin, b, offs_t, offs_h, mask_t,
    stride_xb, stride_xt, stride_xh,
    T, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotates one block of pairs of x by angles, given as cos and sin (tokens, 1, BLOCK_P)."""
    offs_p = tl.arange(0, BLOCK_P)
    mask = mask_t[:, None, None] & (offs_h < HEADS)[None, :, None]
    offs_h = offs_h.to(tl.int64)
    rows = (offs_t * stride_xt)[:, None, None] + (offs_h * stride_xh)[None, :, None]
    x_ptr += b * stride_xb
    out_rows = (offs_t[:, None, None] * HEADS + offs_h[None, :, None]) * D
    out_ptr += b * T * (HEADS * D)
    kind = out_ptr.dtype.element_ty
    mask &= (offs_p < D // 2)[None, None, :]
    offs_p = offs_p[None, None, :]
    x = tl.load(x_ptr + rows + offs_p, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + rows + D // 2 + offs_p, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_rows + offs_p, (x * cos - y * sin).to(kind), mask=mask)
    tl.store(out_ptr + out_rows + D // 2 + offs_p, (x * sin + y * cos).to(kind), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    T,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, CONJUGATE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    Q_BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = Q_BLOCKS + (K + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    block_h, pid = pid % BLOCKS, pid // BLOCKS
    tiles = tl.cdiv(T, BLOCK_T)
    b = (pid // tiles).to(tl.int64)
    offs_t = pid % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    offs_t = offs_t.to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    angles = (offs_t * (D // 2))[:, None, None] + offs_p[None, None, :]
    mask = mask_t[:, None, None] & (offs_p < D // 2)[None, None, :]
    cos = tl.load(cos_ptr + angles, mask=mask, other=0.0, eviction_policy="evict_last")
    sin = tl.load(sin_ptr + angles, mask=mask, other=0.0, eviction_policy="evict_last")
    if CONJUGATE:
        sin = -sin
    offs_h = tl.arange(0, BLOCK_H)
    if block_h < Q_BLOCKS:
        _turn(q_ptr, q_out_ptr, cos, sin, b, offs_t, block_h * BLOCK_H + offs_h, mask_t,
              stride_qb, stride_qt, stride_qh, T, H, D, BLOCK_P)  # fmt: skip
    elif K > 0:
        _turn(k_ptr, k_out_ptr, cos, sin, b, offs_t, (block_h - Q_BLOCKS) * BLOCK_H + offs_h,
              mask_t, stride_kb, stride_kt, stride_kh, T, K, D, BLOCK_P)  # fmt: skip


def tile(H: int, K: int, D: int) -> dict[str, int]:
    """Block sizes: 1024 pairs, 8 a thread, of up to four heads, which share cosines and sines."""
    block_p = max(8, 1 << (D // 2 - 1).bit_length())
    block_h = 4 if max(H, K) > 2 else max(H, K)
    block_t = 1024 // (block_h * block_p)
    return {"BLOCK_T": block_t, "BLOCK_H": block_h, "BLOCK_P": block_p, "num_warps": 4}


def rotary_fwd(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor | None,
    conjugate: bool = False,
) -> None:  # fmt: skip
    """Runs the kernel: writes q and k rotated, with `conjugate` by the negative angles."""
    q, k = _pairs(q), None if k is None else _pairs(k)
    B, T, H, D = q.shape
    K = 0 if k is None else k.shape[2]
    if B * T:
        config = tile(H, K, D)
        blocks = triton.cdiv(H, config["BLOCK_H"]) + triton.cdiv(K, config["BLOCK_H"])
        launch(
            _rotary_kernel, (blocks * B * triton.cdiv(T, config["BLOCK_T"]),),
            q, k, cos.contiguous(), sin.contiguous(), q_out, k_out,
            *q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]), T,
            H=H, K=K, D=D, CONJUGATE=conjugate, **config,
        )  # fmt: skip


def rotary_bwd(
    cos: Tensor, sin: Tensor, dq: Tensor | None, dk: Tensor | None, one: Tensor, two: Tensor
) -> None:
    """Runs the kernel backwards: writes the gradients of q and k, or of the one that comes in."""
    if dq is None:
        dq, dk, one, two = dk, None, two, one
    assert dq is not None
    rotary_fwd(dq, dk, cos, sin, one, None if dk is None else two, conjugate=True)


def _pairs(x: Tensor) -> Tensor:
    """Returns x with its last dimension contiguous: a copy for a few rare layouts, else itself."""
    return x if x.stride(3) == 1 else x.contiguous()
