"""Triton kernels for LayerNorm and RMSNorm; optional inputs are None pointers.

Shapes
    M = rows, N = features.  x, residual, y, total, dy, dtotal, dx, dresidual: (M, N)
    weight, bias, x_bias: (N,)   stats: (2, M) fp32, mean and rstd; RMSNorm (1, M), rstd alone
    P = programs of the backward; partials of dweight, dbias and dx_bias: (P, N) fp32
The math is derived in docs/kernels/norm.md.

A pointer that is None is a constant to the compiler, which drops the code that needs it; CENTRED is
what LayerNorm has over RMSNorm. M and P are never specialised, and no pointer depends on them: no
recompile when they change. eps is a constexpr, because Inductor would type a float as fp64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import as_rows, row_blocks, row_programs
from ..runtime import launch, multiprocessors


@triton.jit
def _vector_of(ptr, offs_n, mask_n):
    """Loads a weight or bias in fp32 and keeps it in the L1 cache, because every block reads it."""
    return tl.load(ptr + offs_n, mask_n, 0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, x_bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm,
    M, N,
    EPS: tl.constexpr, CENTRED: tl.constexpr, LANE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.max_contiguous(tl.arange(0, BLOCK_N), LANE)
    mask_m, mask_n = offs_m < M, offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    x = tl.load(x_ptr + (offs_m * stride_xm)[:, None] + offs_n[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    offs = (offs_m * N)[:, None] + offs_n[None, :]
    if residual_ptr is not None:
        offs_r = (offs_m * stride_rm)[:, None] + offs_n[None, :]
        x += tl.load(residual_ptr + offs_r, mask=mask, other=0.0).to(tl.float32)
        if x_bias_ptr is not None:
            x += _vector_of(x_bias_ptr, offs_n, mask_n)[None, :]
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offs, total, mask=mask)
        x = total.to(tl.float32)  # the backward sees the rounded sum: so do the statistics
    rstd_ptr = stats_ptr
    if CENTRED:
        mean = tl.sum(x, axis=1) / N
        tl.store(stats_ptr + offs_m, mean, mask=mask_m)
        rstd_ptr += M
        x = tl.where(mask_n[None, :], x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / N + EPS)
    tl.store(rstd_ptr + offs_m, rstd, mask=mask_m)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= _vector_of(weight_ptr, offs_n, mask_n)[None, :]
    if bias_ptr is not None:
        y += _vector_of(bias_ptr, offs_n, mask_n)[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _norm_dots_kernel(
    dy_ptr, x_ptr, weight_ptr, stats_ptr, dots_ptr,
    stride_dym, stride_xm,
    M, N,
    CENTRED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes dots (2, M) fp32, the means over a row of dy * weight * xhat and of dy * weight."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(stats_ptr + row + (M if CENTRED else 0))
    by_xhat = tl.zeros((BLOCK_N,), tl.float32)
    by_one = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        x = tl.load(x_ptr + row * stride_xm + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + row * stride_dym + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= _vector_of(weight_ptr, offs_n, mask_n)
        if CENTRED:
            x -= tl.load(stats_ptr + row)
            by_one += g
        by_xhat += g * x
    tl.store(dots_ptr + row, tl.sum(by_xhat, axis=0) * rstd / N)
    tl.store(dots_ptr + M + row, tl.sum(by_one, axis=0) / N)


@triton.jit(do_not_specialize=["M"])
def _norm_bwd_kernel(  # noqa: C901, PLR0915 - the compiler resolves the branches
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, stats_ptr, dots_ptr,
    dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr, dx_bias_ptr,
    stride_dym, stride_dtm, stride_xm,
    M, N,
    CENTRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid, programs = tl.program_id(0), tl.num_programs(0)
    rstd_ptr = stats_ptr + (M if CENTRED else 0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if weight_ptr is not None:
        weight = _vector_of(weight_ptr, offs_n, mask_n)
    dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dx_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), programs, num_stages=STAGES):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        x = tl.load(x_ptr + (offs_m * stride_xm)[:, None] + offs_n[None, :], mask=mask, other=0.0)
        offs_dy = (offs_m * stride_dym)[:, None] + offs_n[None, :]
        dy = tl.load(dy_ptr + offs_dy, mask=mask, other=0.0).to(tl.float32)
        # 0 in rows past the end, so that they do not reach dweight
        rstd = tl.load(rstd_ptr + offs_m, mask=mask_m, other=0.0)
        xhat = x.to(tl.float32)
        if CENTRED:
            xhat -= tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        xhat *= rstd[:, None]
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
        g = dy
        if weight_ptr is not None:
            g *= weight[None, :]
        if dots_ptr is not None:
            by_xhat = tl.load(dots_ptr + offs_m, mask=mask_m, other=0.0)
            by_one = tl.load(dots_ptr + M + offs_m, mask=mask_m, other=0.0)
        else:  # g is 0 where a column is masked, so xhat need not be
            by_xhat = tl.sum(g * xhat, axis=1) / N
            by_one = tl.sum(g, axis=1) / N if CENTRED else by_xhat
        g -= xhat * by_xhat[:, None]
        if CENTRED:
            g -= by_one[:, None]
        dx = g * rstd[:, None]
        if dtotal_ptr is not None:
            offs_dt = (offs_m * stride_dtm)[:, None] + offs_n[None, :]
            dx += tl.load(dtotal_ptr + offs_dt, mask=mask, other=0.0).to(tl.float32)
        if dx_bias_ptr is not None:
            dx_bias += dx
        offs = (offs_m * N)[:, None] + offs_n[None, :]
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + offs, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
    vectors: tl.constexpr = (
        (dweight_ptr is not None) + (dbias_ptr is not None) + (dx_bias_ptr is not None)
    )
    part = pid.to(tl.int64) * (vectors * N) + offs_n
    if dweight_ptr is not None:
        tl.store(dweight_ptr + part, tl.sum(dweight, axis=0), mask=mask_n)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part, tl.sum(dbias, axis=0), mask=mask_n)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + part, tl.sum(dx_bias, axis=0), mask=mask_n)


# --- configurations -------------------------------------------------------------------------------

# Above these the backward's row does not fit the registers of 512 threads: with up to two results
# beside dx (dresidual, and the vectors, each of which is an accumulator), and with more.
WHOLE_ROW = 8_192
WHOLE_ROW_OF_MANY = 4_096
PART_N = 2_048


def fwd_tile(n: int) -> dict[str, int]:
    """Block sizes and warps of the forward: about 2048 elements, 16 or 32 a thread.

    A rule, here and below, instead of a table: N alone sets the sizes, the registers that `python
    -m kernels.aot` counts set the rest, and a table would only repeat it for every N. With 32
    elements a thread a row of 768 takes a third less instructions than with 16 (see
    docs/kernels/norm.md); rows of up to 128 and of more than 1024 spill then.
    """
    block_n, block_m = row_blocks(n, 2048)
    lane = 32 if 128 < block_n <= 1024 else 16
    warps = max(1, min(32, block_m * block_n // (lane * 32)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}


def bwd_tile(n: int) -> dict[str, int]:
    """Block sizes, warps and loads in flight of the backward: 8 elements a thread, 16 at N=8192.

    With three accumulators and the weight that takes 72 to 124 registers on sm_90; with twice the
    elements a thread it takes 128 or spills. Three loads in flight of 8192 fp32 elements and three
    inputs would not fit sm_80's shared memory. Rows of up to 512 have two: three spill on sm_80,
    and twice as many programs run there.
    """
    block_n, block_m = row_blocks(n, 1024 if n <= 512 else 2048)
    warps = max(1, min(16, block_m * block_n // (8 * 32)))
    stages = 3 if 512 < block_n <= 4096 else 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "STAGES": stages}


def bwd_programs(device: torch.device, warps: int) -> int:
    """Returns how many backward programs run at once: 16 warps per multiprocessor."""
    return multiprocessors(device) * max(1, 16 // warps)


# --- launchers ------------------------------------------------------------------------------------


def norm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    x_bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype,
    y: Tensor, total: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    """Runs the forward kernel: writes y, the sum with the residual, and the row statistics."""
    N = x.shape[-1]
    M = x.numel() // N
    if M == 0:
        return
    x = as_rows(x)
    residual = None if residual is None else as_rows(residual)
    config = fwd_tile(N)
    # 16 bytes of the widest dtype: else each thread's elements of the others lie apart from its own
    lane = 16 // max(t.element_size() for t in (x, residual, weight) if t is not None)
    launch(
        _norm_fwd_kernel, (triton.cdiv(M, config["BLOCK_M"]),),
        x, residual, *map(_vector, (weight, bias, x_bias)), y,
        None if residual is None else total, stats,
        x.stride(0), 0 if residual is None else residual.stride(0),
        M, N, EPS=eps, CENTRED=centred, LANE=lane, **config,
    )  # fmt: skip


def _vector(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def bwd_plan(
    M: int, N: int, device: torch.device, dresidual: bool, vectors: int
) -> tuple[dict[str, int], int, int]:
    """Returns how the backward runs: its tile, programs (0 without rows) and parts of a row.

    Args:
        dresidual: True if x and the residual get gradients of two dtypes.
        vectors: number of gradients with N elements.
    """
    most = WHOLE_ROW if dresidual + vectors <= 2 else WHOLE_ROW_OF_MANY
    config = bwd_tile(N if most >= N else PART_N)
    return config, *row_programs(M, N, config, bwd_programs(device, config["num_warps"]))


def norm_bwd(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None,
    dx_dtype: torch.dtype, dresidual_dtype: torch.dtype | None, wanted: list[bool],
    dx: Tensor, dresidual: Tensor, parts: Tensor,
) -> None:  # fmt: skip
    """Runs the backward kernels for the normalised input x: writes dx, dresidual and parts.

    dresidual, if it has a dtype, is dx in that dtype; the last of parts are the column sums of dx.
    """
    N = x.shape[-1]
    M = x.numel() // N
    if M == 0:
        return
    apart, centred = dresidual_dtype is not None, len(stats) == 2
    config, programs, parts_n = bwd_plan(M, N, x.device, apart, sum(wanted))
    dy, x, weight = as_rows(dy), as_rows(x), _vector(weight)
    dtotal = None if dtotal is None else as_rows(dtotal)
    dots = None
    if parts_n > 1:
        dots = torch.empty(2, M, dtype=torch.float32, device=x.device)
        launch(
            _norm_dots_kernel, (M,),
            dy, x, weight, stats, dots, dy.stride(0), x.stride(0), M, N,
            CENTRED=centred, BLOCK_N=PART_N, num_warps=8,
        )  # fmt: skip
    columns = iter(parts.split(N, dim=1))
    launch(
        _norm_bwd_kernel, (programs, parts_n),
        dy, dtotal, x, weight, stats, dots,
        dx, dresidual if apart else None, *(next(columns) if it else None for it in wanted),
        dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0),
        M, N, CENTRED=centred, **config,
    )  # fmt: skip
