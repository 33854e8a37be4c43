"""Backward pass of attention, which computes the weights again from the stored row statistics.

With P the weights, dP = dO V^T and delta = rowsum(dO * O):

    dS = P * (dP - delta)      dQ = scale dS K      dK = scale dS^T Q      dV = P^T dO

One kernel walks over the keys of a tile of queries and writes dQ, the other over the queries of a
tile of keys and writes dK and dV. Nothing is added up across programs, so there are no atomics and
every run gives the same bits; the price is 7 matrix products a tile instead of 5. Dropout with
mask M and keep scale c: dP becomes c M * dP and dV = (c M * P)^T dO; delta stays as it is. The
derivation is in docs/kernels/attention.md.

Shapes
    as in attention_fwd; dout, dq: (B, Tq, H, D)   dk, dv: (B, Tk, K, D)   delta: (B, H, Tq) fp32
Source
    Dao 2023, arXiv:2307.08691, alg. 2, with dQ taken out of the loop over keys.
"""

# pyright: reportGeneralTypeIssues=false
# (it infers NoReturn for the result of a nested @triton.jit call)

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime import arch, launch
from .config import config
from .forward import (
    constexprs,
    document,
    dropout_keep_tile,
    key_parts,
    load_rows,
    masked_start,
    query_tile,
    readable,
    schedule,
    store_rows,
    tile_parts,
    together_in_cache,
    visible,
)
from .plain import AttentionOptions


@triton.jit(do_not_specialize=["Tq", "Tk", "num_heads", "together", "window", "drop_below"])
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr,
    starts_ptr, ends_ptr, seed_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    stride_dqb, stride_dqt,
    Tq, Tk, num_heads, together, window,
    scale, scale_log2, drop_below, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of a tile of queries, and `delta`, which both kernels need."""
    batch, h, bh, start_m = query_tile(Tq, num_heads, together, H, CAUSAL, BLOCK_M)
    k_ptr += batch * stride_kb + (h // GROUP) * stride_kh
    v_ptr += batch * stride_vb + (h // GROUP) * stride_vh
    seed = tl.load(seed_ptr) if DROPOUT else 0
    offs_m = start_m + tl.arange(0, BLOCK_M)
    place = (offs_m + (Tk - Tq))[:, None]
    start, end = document(starts_ptr, ends_ptr, batch * Tk + place, offs_m[:, None] < Tq, DOCS)
    a, b, c, both = key_parts(
        start_m, batch, Tq, Tk, window, starts_ptr, ends_ptr, CAUSAL, WINDOW, DOCS, BLOCK_M, BLOCK_N
    )

    do = load_rows(
        dout_ptr + batch * stride_db + h * stride_dh, stride_dt, start_m, Tq,
        BLOCK_M, D, BLOCK_D, True,
    )  # fmt: skip
    out = load_rows(
        out_ptr + (batch * Tq * H + h) * D, H * D, start_m, Tq, BLOCK_M, D, BLOCK_D, True
    )
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + bh * Tq + offs_m, delta, mask=offs_m < Tq)
    lse = tl.load(lse_ptr + bh * Tq + offs_m, mask=offs_m < Tq, other=float("inf"))
    q = load_rows(
        q_ptr + batch * stride_qb + h * stride_qh, stride_qt, start_m, Tq, BLOCK_M, D, BLOCK_D, True
    )
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for masked in tl.static_range(2):
        for t in range(0 if masked else b, both if masked else c, BLOCK_N):
            start_n = masked_start(t, a, b, c, WINDOW or DOCS) if masked else t
            k = load_rows(k_ptr, stride_kt, start_n, Tk, BLOCK_N, D, BLOCK_D, masked)
            v = load_rows(v_ptr, stride_vt, start_n, Tk, BLOCK_N, D, BLOCK_D, masked)
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            p = tl.exp2(qk * scale_log2 - lse[:, None])
            if masked:
                key = (start_n + tl.arange(0, BLOCK_N))[None, :]
                keep = visible(place, key, start, end, key, Tk, window, CAUSAL, WINDOW, DOCS)
                p = tl.where(keep, p, 0.0)
            if DROPOUT:
                kept = dropout_keep_tile(seed, bh, start_m, start_n, drop_below, BLOCK_M, BLOCK_N)
                dp = tl.where(kept, dp * keep_scale, 0.0)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq *= scale
    store_rows(
        dq_ptr + batch * stride_dqb + h * D, stride_dqt, start_m, Tq, dq, BLOCK_M, D, BLOCK_D
    )


@triton.jit
def _query_parts(
    start_n, batch, Tq, Tk, window, starts_ptr, ends_ptr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DOCS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Splits the queries that see a tile of keys into masked and unmasked tiles.

    Until the last lines, queries are counted by their positions among the keys.
    """
    first, last = start_n, tl.minimum(start_n + BLOCK_N, Tk) - 1
    shift = Tk - Tq
    lo, full_lo, full_hi, hi = shift, shift, Tk, Tk
    if CAUSAL:
        lo, full_lo = tl.maximum(lo, first), tl.maximum(full_lo, last)
    if WINDOW:
        full_hi, hi = tl.minimum(Tk, first + window), tl.minimum(Tk, last + window)
    if DOCS:
        start, end = document(starts_ptr, ends_ptr, batch * Tk + first, True, DOCS)
        lo, full_hi = tl.maximum(lo, start), tl.minimum(full_hi, end)
        start, end = document(starts_ptr, ends_ptr, batch * Tk + last, True, DOCS)
        full_lo, hi = tl.maximum(full_lo, start), tl.minimum(hi, end)
    if WINDOW or DOCS:
        return tile_parts(lo - shift, full_lo - shift, full_hi - shift, hi - shift, BLOCK_M)
    # Rows past the last query have lse +inf, so their weights are 0 without a mask.
    a, b, _, _ = tile_parts(lo - shift, full_lo - shift, Tq, Tq, BLOCK_M)
    return a, b, Tq, b - a


@triton.jit(do_not_specialize=["Tq", "Tk", "num_heads", "together", "window", "drop_below"])
def _attention_bwd_dkv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    starts_ptr, ends_ptr, seed_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    stride_dkb, stride_dkt,
    Tq, Tk, num_heads, together, window,
    scale, scale_log2, drop_below, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a tile of keys and values, over all query heads that share it."""
    K: tl.constexpr = H // GROUP
    # With a causal mask the first tiles are seen by most queries, so heavy tiles start first.
    tile, bk = schedule(tl.cdiv(Tk, BLOCK_N), num_heads, together)
    batch, hk = bk // K, bk % K
    start_n = tile * BLOCK_N
    k = load_rows(
        k_ptr + batch * stride_kb + hk * stride_kh, stride_kt, start_n, Tk,
        BLOCK_N, D, BLOCK_D, True,
    )  # fmt: skip
    v = load_rows(
        v_ptr + batch * stride_vb + hk * stride_vh, stride_vt, start_n, Tk,
        BLOCK_N, D, BLOCK_D, True,
    )  # fmt: skip
    seed = tl.load(seed_ptr) if DROPOUT else 0
    key = (start_n + tl.arange(0, BLOCK_N))[:, None]
    start, end = document(starts_ptr, ends_ptr, batch * Tk + key, key < Tk, DOCS)
    a, b, c, both = _query_parts(
        start_n, batch, Tq, Tk, window, starts_ptr, ends_ptr, CAUSAL, WINDOW, DOCS, BLOCK_M, BLOCK_N
    )

    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for g in range(GROUP):
        h = hk * GROUP + g
        bh = batch * H + h
        qh_ptr = q_ptr + batch * stride_qb + h * stride_qh
        doh_ptr = dout_ptr + batch * stride_db + h * stride_dh
        for masked in tl.static_range(2):
            for t in range(0 if masked else b, both if masked else c, BLOCK_M):
                start_m = masked_start(t, a, b, c, WINDOW or DOCS) if masked else t
                rows = start_m + tl.arange(0, BLOCK_M)
                q = load_rows(qh_ptr, stride_qt, start_m, Tq, BLOCK_M, D, BLOCK_D, True)
                lse = tl.load(lse_ptr + bh * Tq + rows, mask=rows < Tq, other=float("inf"))
                do = load_rows(doh_ptr, stride_dt, start_m, Tq, BLOCK_M, D, BLOCK_D, True)
                dpt = tl.dot(v, tl.trans(do), input_precision="ieee")
                st = tl.dot(k, tl.trans(q), input_precision="ieee")
                pt = tl.exp2(st * scale_log2 - lse[None, :])
                if masked:
                    place = (rows + (Tk - Tq))[None, :]
                    keep = visible(place, key, start, end, place, Tk, window, CAUSAL, WINDOW, DOCS)
                    pt = tl.where(keep, pt, 0.0)
                dropped = pt
                if DROPOUT:
                    kept = dropout_keep_tile(
                        seed, bh, start_n, start_m, drop_below, BLOCK_N, BLOCK_M, True
                    )
                    dropped = tl.where(kept, pt, 0.0)
                    dpt = tl.where(kept, dpt * keep_scale, 0.0)
                dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision="ieee")
                delta = tl.load(delta_ptr + bh * Tq + rows, mask=rows < Tq, other=0.0)
                dst = pt * (dpt - delta[None, :])
                dk = tl.dot(dst.to(q.dtype), q, dk, input_precision="ieee")
    if DROPOUT:
        dv *= keep_scale
    dk *= scale
    offset = batch * stride_dkb + hk * D
    store_rows(dk_ptr + offset, stride_dkt, start_n, Tk, dk, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr + offset, stride_dkt, start_n, Tk, dv, BLOCK_N, D, BLOCK_D)


def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    options: AttentionOptions, grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Writes dq, dk and dv into `grads`: tensors or views in which heads lie D apart."""
    (B, Tq, H, D), (Tk, K) = q.shape, k.shape[1:3]
    if B * Tq * Tk * H * D == 0:
        for x in grads:
            x.zero_()
        return
    dq, dk, dv = grads
    assert dk.stride() == dv.stride()
    assert dq.stride(2) == dk.stride(2) == D
    q, k, v, dout = readable(q), readable(k), readable(v), readable(dout)
    delta = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    common = constexprs(q, k, options)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    scalars = (options.window or 0, *options.scales(q), *options.dropout())

    meta = common | config("dq", q, common, arch(q.device))
    launch(
        _attention_bwd_dq_kernel, (-(-Tq // meta["BLOCK_M"]) * B * H,),
        q, k, v, out, dout, dq, lse, delta, *options.tensors,
        *strides, *dq.stride()[:2],
        Tq, Tk, B * H, together_in_cache(k, 1 / meta["GROUP"], B * H), *scalars, **meta,
    )  # fmt: skip
    meta = common | config("dkv", q, common, arch(q.device))
    launch(
        _attention_bwd_dkv_kernel, (-(-Tk // meta["BLOCK_N"]) * B * K,),
        q, k, v, dout, dk, dv, lse, delta, *options.tensors,
        *strides, *dk.stride()[:2],
        Tq, Tk, B * K, together_in_cache(q, meta["GROUP"], B * K), *scalars, **meta,
    )  # fmt: skip
