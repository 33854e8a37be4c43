"""Triton kernels for attention of a few new tokens over a key/value cache.

A program holds the queries of one key/value head, all new tokens and all heads of the group as the
rows of one tile, so that the cache is read once for all of them. Row r is query r // GROUP and head
r % GROUP of the group. Too few programs would leave a GPU idle where the batch is small: the keys
are cut into splits, each with softmax statistics of its own, and a second kernel adds them up.

Shapes
    q: (B, Tq, H, D)   k, v: (B, Tmax, K, D), or (pages, PAGE, K, D) with table (B, max_pages)
    lengths: (B,)   starts: (B, Tq)   out: (B, Tq, H, D), or with SPLIT (B, Tq, H, splits, D) fp32
    lse: (B, Tq, H, splits) fp32, log2 of the sum of 2**score; -inf where a split sees nothing
Source
    Dao et al. 2023, "Flash-Decoding for long-context inference".  Pages: Kwon et al. 2023,
    arXiv:2309.06180.
"""

# pyright: reportGeneralTypeIssues=false
# (it infers NoReturn for the result of a nested @triton.jit call)

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import padded
from ..invariant import is_batch_invariant
from ..runtime import arch, launch, multiprocessors


@triton.jit
def _program(num_tiles, num_splits, K: tl.constexpr):
    """Returns the (tile of rows, split, batch, key/value head) that this program computes.

    Tiles of the same keys follow each other: all but the first read the keys from L2.
    """
    pid = tl.program_id(0)
    head = pid // (num_tiles * num_splits)
    batch, kv = (head // K).to(tl.int64), (head % K).to(tl.int64)
    return pid % num_tiles, pid // num_tiles % num_splits, batch, kv


@triton.jit
def _sight(lengths_ptr, starts_ptr, batch, i, last_i, mask, Tq, Tmax, STARTS: tl.constexpr):
    """Computes which cache positions a query and its tile see: (position, start, lo, hi).

    Query i sees [start, place], and some query of the tile [lo, hi).
    """
    # nothing beyond the cache is read, whatever the length
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), Tmax).to(tl.int32)
    place = length - Tq + i
    start = place * 0
    lo, hi = 0, tl.maximum(length - Tq + last_i + 1, 0)
    if STARTS:
        start = tl.load(starts_ptr + batch * Tq + i, mask=mask, other=Tmax)
        start = tl.minimum(tl.maximum(start, 0), Tmax).to(tl.int32)
        lo = tl.minimum(tl.min(start, 0), hi)
    return place, start, lo, hi


@triton.jit
def _load_keys(
    ptr, key, page, inside, stride_page, stride_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Loads some keys, or values, as (BLOCK_N, BLOCK_D); 0, and no read, where not `inside`."""
    # 64 bits: a cache may have more than 2**31 elements
    offs = key.to(tl.int64) * stride_t
    if PAGE:
        offs = page * stride_page + (key % PAGE).to(tl.int64) * stride_t
    offs_d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (offs_d < D)[None, :]
    return tl.load(ptr + offs[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["Tq", "Tmax", "num_splits", "num_pages", "max_pages"])
def _decode_attention_kernel(  # noqa: PLR0915 - a branch of constants
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lengths_ptr, starts_ptr, table_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    Tq, Tmax, num_splits, num_pages, max_pages, scale_log2,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, STARTS: tl.constexpr, SPLIT: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, split, batch, kv = _program(tl.cdiv(Tq * GROUP, BLOCK_M), num_splits, H // GROUP)
    offs_r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row = offs_r < Tq * GROUP
    i, h = offs_r // GROUP, kv * GROUP + offs_r % GROUP
    last_i = (tl.minimum((tile + 1) * BLOCK_M, Tq * GROUP) - 1) // GROUP
    place, start, lo, hi = _sight(lengths_ptr, starts_ptr, batch, i, last_i, row, Tq, Tmax, STARTS)
    if SPLIT_KEYS:  # bits may not depend on the lengths: a block begins at a multiple of BLOCK_N
        first = tl.maximum(split * SPLIT_KEYS, lo // BLOCK_N * BLOCK_N)
        last = tl.minimum((split + 1) * SPLIT_KEYS, hi)
    else:
        each = tl.cdiv(tl.cdiv(hi - lo, num_splits), BLOCK_N) * BLOCK_N
        first = lo + split * each
        last = tl.minimum(first + each, hi)

    seen = row[:, None] & (offs_d < D)[None, :]
    offs_q = batch * stride_qb + i.to(tl.int64) * stride_qt + h * stride_qh
    q = tl.load(q_ptr + offs_q[:, None] + offs_d[None, :], mask=seen, other=0.0)
    k_ptr += kv * stride_kh if PAGE else batch * stride_kb + kv * stride_kh
    v_ptr += kv * stride_vh if PAGE else batch * stride_vb + kv * stride_vh
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for start_n in range(first, last, BLOCK_N):
        key = start_n + tl.arange(0, BLOCK_N)
        inside = key < last
        page = 0
        if PAGE:
            page = tl.load(table_ptr + batch * max_pages + key // PAGE, mask=inside, other=0)
            page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        k = _load_keys(k_ptr, key, page, inside, stride_kb, stride_kt, D, BLOCK_D, PAGE)
        # scaled before the maximum is taken, so that the scale may have any sign
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        keep = inside[None, :] & (key[None, :] <= place[:, None])
        if STARTS:
            keep = keep & (key[None, :] >= start[:, None])
        qk = tl.where(keep, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(qk - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        v = _load_keys(v_ptr, key, page, inside, stride_vb, stride_vt, D, BLOCK_D, PAGE)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    nothing = l_i == 0.0
    acc = acc / tl.where(nothing, 1.0, l_i)[:, None]
    out_row = (batch * Tq + i) * H + h
    if SPLIT:
        lse = tl.where(nothing, float("-inf"), m_i + tl.log2(tl.where(nothing, 1.0, l_i)))
        tl.store(lse_ptr + out_row * num_splits + split, lse, mask=row)
        out_row = out_row * num_splits + split
        # a split without keys needs only its lse, -inf
        seen = row[:, None] & (offs_d < tl.where(first < last, D, 0))[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * D + offs_d[None, :], out, mask=seen)


@triton.jit(do_not_specialize=["num_splits"])
def _decode_combine_kernel(
    parts_ptr, lse_ptr, out_ptr, num_splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Computes out (rows, D) from the splits' (rows, splits, D): their mean, weighted by 2**lse."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    lse_ptr += row * num_splits
    parts_ptr += row * num_splits * D
    every = tl.arange(0, MAX_SPLITS)
    lses = tl.load(lse_ptr + every, mask=every < num_splits, other=float("-inf"))
    top = tl.max(lses, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # no split saw a key: -inf - -inf is NaN
    total = tl.sum(tl.exp2(lses - top), 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        lse = tl.load(lse_ptr + offs_s, mask=offs_s < num_splits, other=float("-inf"))
        # an empty split wrote nothing
        written = (lse != float("-inf"))[:, None] & (offs_d < D)[None, :]
        part = tl.load(parts_ptr + offs_s[:, None] * D + offs_d[None, :], mask=written, other=0.0)
        acc += tl.sum(part * tl.exp2(lse - top)[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * D + offs_d, acc.to(out_ptr.dtype.element_ty), mask=offs_d < D)


LOG2E = math.log2(math.e)
TILE_BYTES = 16 << 10
"""Bytes of a block of keys. Two blocks of keys and values are then loaded ahead, 64 KB, and two
programs fit into the 163 KB of an sm_80; 4.3 TB/s over 132 multiprocessors need 26 KB each to
cover 800 ns."""
PROGRAMS = 2
"""Number of programs that run on a multiprocessor at once."""
MAX_SPLITS = 128
SPLIT_KEYS = 1024
"""Keys of a split where results must be batch-invariant; the interpreter has 32."""

# --- configurations -------------------------------------------------------------------------------


def tile(rows: int, D: int, itemsize: int, paged: bool, arch: int) -> dict[str, int]:
    """Block sizes, warps and stages, which follow from the loads in flight and need no table.

    Rows beyond 32 go to another tile, which reads the keys from L2. fp32, without tensor cores,
    spills with 32 rows, 32 keys, or 4 warps. Where the page must be read before its keys, two
    blocks in flight take five stages instead of three.
    """
    block_m = 16 if rows <= 16 or itemsize == 4 else 32
    if arch == 0:  # interpreted: small, so that short caches show splits
        return {"BLOCK_M": block_m, "BLOCK_N": 16}
    most = 16 if itemsize == 4 else 64 if D < 64 else 128
    block_n = max(16, min(most, TILE_BYTES // (padded(D) * itemsize)))
    warps, stages = 8 if itemsize == 4 else 4, 5 if paged else 3
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


@functools.lru_cache(1024)
def splits(tiles: int, keys: int, block_n: int, slots: int) -> int:
    """Returns into how many parts to split the keys; one program reads each part.

    Programs run in waves of `slots`, and the last wave may be nearly empty: of the counts that fill
    their waves within 10 % of the best one, the smallest, since each split is written and read
    again. No split is shorter than two blocks. The lengths do not matter: only the device knows
    them.

    Args:
        tiles: number of programs without splits.
        keys: Tmax.
        block_n: keys of a block.
        slots: number of programs that run at once.

    Returns:
        int: 1 to MAX_SPLITS.
    """
    most = max(1, min(MAX_SPLITS, keys // (2 * block_n)))

    def filled(count: int) -> float:
        waves = tiles * count / slots
        return waves / math.ceil(waves)

    best = max(map(filled, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if filled(n) >= 0.9 * best)


# --- launcher -------------------------------------------------------------------------------------


def decode_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor | None, table: Tensor | None,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Runs the kernels: writes the output (B, Tq, H, D)."""
    B, Tq, H, D = q.shape
    pages, page, K, _ = k.shape
    Tmax = page if table is None else table.shape[1] * page
    if out.numel() == 0 or Tmax == 0 or pages == 0:
        out.zero_()
        return
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    lengths = lengths.contiguous()
    starts, table = (None if x is None else x.contiguous() for x in (starts, table))
    rows, invariant = Tq * (H // K), is_batch_invariant()
    sm = arch(q.device)
    config = tile(1 if invariant else rows, D, q.element_size(), table is not None, sm)
    tiles = B * K * -(-rows // config["BLOCK_M"])
    count = splits(tiles, Tmax, config["BLOCK_N"], PROGRAMS * multiprocessors(q.device))
    split_keys = 0
    if invariant:
        split_keys = SPLIT_KEYS if sm else 32
        count = -(-Tmax // split_keys)
        if count > MAX_SPLITS:
            most = MAX_SPLITS * split_keys
            raise ValueError(f"k_cache: expected at most {most} positions, got {Tmax}")
    parts, lse = out, None
    if count > 1:
        parts = torch.empty((B, Tq, H, count, D), dtype=torch.float32, device=q.device)
        lse = torch.empty((B, Tq, H, count), dtype=torch.float32, device=q.device)
    launch(
        _decode_attention_kernel, (tiles * count,),
        q, k, v, parts, lse, lengths, starts, table,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        Tq, Tmax, count, pages, 0 if table is None else table.shape[1], scale * LOG2E,
        H=H, GROUP=H // K, D=D, BLOCK_D=padded(D), PAGE=0 if table is None else page,
        STARTS=starts is not None, SPLIT=count > 1, SPLIT_KEYS=split_keys, **config,
    )  # fmt: skip
    if lse is not None:
        launch(
            _decode_combine_kernel, (B * Tq * H,),
            parts, lse, out, count,
            D=D, BLOCK_D=padded(D), MAX_SPLITS=MAX_SPLITS, BLOCK_S=16, num_warps=1,
        )  # fmt: skip
