"""Forward pass of attention: its kernel, its launch, and the code that the backward shares with it.

A query's place is its distance from the first key: place = i + Tk - Tq, so that the last query
stands beside the last key. Every mask is an interval: query at place p sees the keys [lo, hi) with

    lo = max(0, p - window + 1, start of p's document)      hi = min(Tk, p + 1, end of p's document)

and both ends grow with p. A tile of queries therefore meets a run of keys in three parts: keys that
some of its queries see, keys that all see, keys that some see. The middle part has a loop without
masks, the outer two share one with them, and what lies beyond is never touched. Seen from the keys
the same holds for places.

Shapes
    q: (B, Tq, H, D)   k, v: (B, Tk, K, D)   out: (B, Tq, H, D), contiguous   lse: (B, H, Tq) fp32
    starts, ends: (B, Tk) int32, the interval of each place's document   seed: (1,) int64
    BLOCK_M queries and BLOCK_N keys a tile; GROUP = H // K
Source
    Tiling: Dao 2023, arXiv:2307.08691, alg. 1.  Running maximum: Milakov & Gimelshein 2018,
    arXiv:1805.02867.
"""

# pyright: reportGeneralTypeIssues=false
# (it infers NoReturn for the result of a nested @triton.jit call)

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..checks import padded
from ..runtime import arch, launch
from .config import config
from .dropout import ROUNDS
from .plain import AttentionOptions

L2_BYTES = 32 << 20  # for the keys and values in flight; an A100 has 40 MB, an H100 50 MB


# --- where a program works ------------------------------------------------------------------------


@triton.jit
def schedule(num_tiles, num_heads, together):
    """Returns the (tile, head) that this program computes.

    `together` heads alternate, so that their tensors stay in the L2 cache.
    """
    pid = tl.program_id(0)
    group = pid // (num_tiles * together)
    first = group * together
    size = tl.minimum(together, num_heads - first)
    rest = pid - group * (num_tiles * together)
    return rest // size, (first + rest % size).to(tl.int64)


@triton.jit
def query_tile(
    Tq, num_heads, together, H: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Returns this program's tile: (batch, head, both as one number, first query)."""
    num_tiles = tl.cdiv(Tq, BLOCK_M)
    tile, bh = schedule(num_tiles, num_heads, together)
    if CAUSAL:  # start with the last queries, which see most keys
        tile = num_tiles - 1 - tile
    return bh // H, bh % H, bh, tile * BLOCK_M


# --- what sees what -------------------------------------------------------------------------------


@triton.jit
def tile_parts(lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    """Splits a range of positions into tiles that need a mask and tiles that need none.

    Returns (a, b, c, number of masked tiles): tiles from b to c need no mask, `masked_start` gives
    the others. Some row of the other side sees [lo, hi), all of them see [full_lo, full_hi).
    """
    a = lo // BLOCK * BLOCK
    d = tl.cdiv(tl.maximum(hi, a), BLOCK) * BLOCK
    b = tl.minimum(tl.cdiv(full_lo, BLOCK) * BLOCK, d)
    c = tl.maximum(tl.maximum(full_hi, 0) // BLOCK * BLOCK, b)
    return a, b, c, b - a + tl.maximum(d - c, 0)


@triton.jit
def masked_start(t, a, b, c, SPLIT: tl.constexpr):
    """Returns the first position of the t-th tile that needs a mask.

    Tiles of [a, b) come first, then those from c on, in one loop, because a second loop costs
    registers. Without SPLIT all masked tiles are adjacent and start at a.
    """
    return a + t + tl.where(t >= b - a, c - b, 0) if SPLIT else a + t


@triton.jit
def document(starts_ptr, ends_ptr, offs, mask, DOCS: tl.constexpr):
    """Loads the start and end of the documents of some positions; unused without DOCS."""
    start, end = offs, offs
    if DOCS:
        start = tl.load(starts_ptr + offs, mask=mask, other=0)
        end = tl.load(ends_ptr + offs, mask=mask, other=0)
    return start, end


@triton.jit
def key_parts(
    start_m, batch, Tq, Tk, window, starts_ptr, ends_ptr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, DOCS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Splits the keys that a tile of queries sees into masked and unmasked tiles."""
    first = start_m + (Tk - Tq)
    last = tl.minimum(start_m + BLOCK_M, Tq) - 1 + (Tk - Tq)
    lo, full_lo, full_hi, hi = 0, 0, Tk, Tk
    if CAUSAL:
        full_hi = tl.minimum(Tk, first + 1)
        hi = tl.minimum(Tk, last + 1)
    if WINDOW:
        lo = tl.maximum(0, first - window + 1)
        full_lo = tl.maximum(0, last - window + 1)
    if DOCS:
        start, end = document(starts_ptr, ends_ptr, batch * Tk + first, True, DOCS)
        lo, full_hi = tl.maximum(lo, start), tl.minimum(full_hi, end)
        start, end = document(starts_ptr, ends_ptr, batch * Tk + last, True, DOCS)
        full_lo, hi = tl.maximum(full_lo, start), tl.minimum(hi, end)
    if WINDOW or DOCS:
        return tile_parts(lo, full_lo, full_hi, hi, BLOCK_N)
    c = tl.maximum(full_hi, 0) // BLOCK_N * BLOCK_N
    return c, 0, c, hi - c


@triton.jit
def visible(
    place, key, start, end, other, Tk, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """Computes the attention mask of a tile: True where the query sees the key.

    [start, end) is the document of one of the two, `other` the position of the other one.
    """
    # causal: positions end at Tk - 1, and rows past Tk are not stored
    keep = key <= place if CAUSAL else key < Tk
    if WINDOW:
        keep = keep & (key > place - window)
    if DOCS:
        keep = keep & (other >= start) & (other < end)
    return keep


# --- memory ---------------------------------------------------------------------------------------


@triton.jit
def load_rows(
    ptr, stride, first, T,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loads rows first.. of a (T, D) matrix as (ROWS, BLOCK_D), with 0 outside of it."""
    offs_r = first + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    # int64 from the first multiply: row * stride passes 2**31 in long or oddly strided tensors
    first = tl.cast(first, tl.int64)
    ptrs = ptr + first * stride + (tl.arange(0, ROWS)[:, None] * stride + offs_d[None, :])
    if MASKED and D != BLOCK_D:
        return tl.load(ptrs, mask=(offs_r < T)[:, None] & (offs_d < D)[None, :], other=0.0)
    if MASKED:
        return tl.load(ptrs, mask=(offs_r < T)[:, None], other=0.0)
    if D != BLOCK_D:
        return tl.load(ptrs, mask=(offs_d < D)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_rows(
    ptr, stride, first, T, x, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Stores `x` (ROWS, BLOCK_D) as rows first.. of a (T, D) matrix; skips what lies outside."""
    offs_r = first + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = ptr + offs_r.to(tl.int64)[:, None] * stride + offs_d[None, :]
    mask = (offs_r < T)[:, None]
    if D != BLOCK_D:
        mask = mask & (offs_d < D)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


# --- dropout --------------------------------------------------------------------------------------

_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def _spread(a, b, c, d, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Builds a (ROWS, COLS) tile; bit 3 of row i (a b | c d) and of column j picks one of a, b, c,
    d.
    """
    x = tl.join(tl.join(a, c), tl.join(b, d))  # (..., bit of i, bit of j)
    x = tl.reshape(x, (ROWS // 16, 8, COLS // 16, 8, 2, 2))
    return tl.reshape(tl.permute(x, (0, 4, 1, 2, 5, 3)), (ROWS, COLS))


@triton.jit
def dropout_keep_tile(
    seed, bh, first_row, first_col, drop_below,
    ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Computes the dropout mask of a tile: bool (ROWS, COLS), False where a weight is dropped.

    Rows are queries, or keys where TRANSPOSED. A word, as a signed number, keeps its weight where
    it is at least `drop_below`.
    """
    offs_r, offs_c = tl.arange(0, ROWS // 2), tl.arange(0, COLS // 2)
    row = (first_row + offs_r // 8 * 16 + offs_r % 8)[:, None] + (offs_c * 0)[None, :]
    col = (first_col + offs_c // 8 * 16 + offs_c % 8)[None, :] + (offs_r * 0)[:, None]
    head = row * 0 + bh.to(tl.int32)
    if TRANSPOSED:
        a, b, c, d = tl.philox(seed, col, row, head, row * 0, _ROUNDS)
        words = _spread(a, c, b, d, ROWS, COLS)
    else:
        a, b, c, d = tl.philox(seed, row, col, head, row * 0, _ROUNDS)
        words = _spread(a, b, c, d, ROWS, COLS)
    return words.to(tl.int32, bitcast=True) >= drop_below


# --- forward --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["Tq", "Tk", "num_heads", "together", "window", "drop_below"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, starts_ptr, ends_ptr, seed_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    Tq, Tk, num_heads, together, window,
    scale_log2, drop_below, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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

    q = load_rows(
        q_ptr + batch * stride_qb + h * stride_qh, stride_qt, start_m, Tq, BLOCK_M, D, BLOCK_D, True
    )
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for masked in tl.static_range(2):
        for t in range(0 if masked else b, both if masked else c, BLOCK_N):
            start_n = masked_start(t, a, b, c, WINDOW or DOCS) if masked else t
            k = load_rows(k_ptr, stride_kt, start_n, Tk, BLOCK_N, D, BLOCK_D, masked)
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
            if masked:
                key = (start_n + tl.arange(0, BLOCK_N))[None, :]
                keep = visible(place, key, start, end, key, Tk, window, CAUSAL, WINDOW, DOCS)
                qk = tl.where(keep, qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, 1) * scale_log2)
            m_safe = m_new
            if masked:  # a row may have seen no key yet, and -inf - -inf is NaN
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(qk * scale_log2 - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
            l_i = l_i * alpha + tl.sum(p, 1)
            m_i = m_new
            if DROPOUT:
                kept = dropout_keep_tile(seed, bh, start_m, start_n, drop_below, BLOCK_M, BLOCK_N)
                p = tl.where(kept, p, 0.0)
            v = load_rows(v_ptr, stride_vt, start_n, Tk, BLOCK_N, D, BLOCK_D, masked)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    # +inf where no key was seen: the backward's exp2(score - lse) is then 0
    nothing = l_i == 0.0
    lse = tl.where(nothing, float("inf"), m_i + tl.log2(tl.where(nothing, 1.0, l_i)))
    tl.store(lse_ptr + bh * Tq + offs_m, lse, mask=offs_m < Tq)
    factor = 1.0 / tl.where(nothing, 1.0, l_i)
    if DROPOUT:
        factor *= keep_scale
    store_rows(
        out_ptr + (batch * Tq * H + h) * D, H * D, start_m, Tq, acc * factor[:, None],
        BLOCK_M, D, BLOCK_D,
    )  # fmt: skip


# --- launch ---------------------------------------------------------------------------------------


def readable(x: Tensor) -> Tensor:
    """Returns `x` (B, T, H, D) as the kernels can read it: a copy for a few rare layouts, else
    itself.

    The last dimension must be contiguous; within a tile rows are addressed in 32 bits.
    """
    return x if x.stride(3) == 1 and x.stride(1) < 1 << 22 else x.contiguous()


def constexprs(q: Tensor, k: Tensor, options: AttentionOptions) -> dict[str, Any]:
    """Returns the compile-time constants (`tl.constexpr`) that all attention kernels share."""
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


def together_in_cache(x: Tensor, heads_each: float, num_heads: int) -> int:
    """Returns how many heads take turns: a power of two whose tensors together fit into L2."""
    each = 2 * x.shape[1] * x.shape[3] * x.element_size() * heads_each
    return min(num_heads, 1 << max(0, math.floor(math.log2(L2_BYTES / each))))


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor, lse: Tensor
) -> None:
    """Computes attention: writes the output and the base-2 log-sum-exp of each query's scores.

    The log-sum-exp is (B, H, Tq), and +inf where a query sees no key.
    """
    (B, Tq, H, _), Tk = q.shape, k.shape[1]
    if out.numel() == 0 or Tk == 0:
        out.zero_()
        lse.fill_(math.inf)
        return
    q, k, v = readable(q), readable(k), readable(v)
    meta = constexprs(q, k, options)
    meta |= config("fwd", q, meta, arch(q.device))
    launch(
        _attention_fwd_kernel, (-(-Tq // meta["BLOCK_M"]) * B * H,),
        q, k, v, out, lse, *options.tensors,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        Tq, Tk, B * H, together_in_cache(k, 1 / meta["GROUP"], B * H), options.window or 0,
        options.scales(q)[1], *options.dropout(), **meta,
    )  # fmt: skip
