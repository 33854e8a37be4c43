"""LayerNorm and RMSNorm on the device: one kernel pair, optional inputs by None pointers.

Shapes
    M = rows, N = features.  x, residual, y, total, dy, dtotal, dx, dresidual: (M, N)
    weight, bias: (N,)   stats: (2, M) fp32, mean and rstd; RMSNorm (1, M), rstd alone
    P = programs of the backward; partials of dweight and dbias: (P, N) fp32
The math is derived in docs/kernels.md.

A pointer that is None is a constant to the compiler, and the code behind it is not there; CENTRED
is what LayerNorm has over RMSNorm. M and P are never specialised, and no pointer depends on them:
no recompile when they change. eps is a constexpr, because Inductor would type a float as fp64.
"""

import triton
import triton.language as tl


@triton.jit
def _vector_of(ptr, offs_n, mask_n):
    """Weight or bias in fp32, to be kept in L1: every block reads it, x passes through once."""
    return tl.load(ptr + offs_n, mask_n, 0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, stats_ptr,
    stride_xm, stride_rm,
    M, N,
    EPS: tl.constexpr, CENTRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    x = tl.load(x_ptr + (offs_m * stride_xm)[:, None] + offs_n[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    offs = (offs_m * N)[:, None] + offs_n[None, :]
    if residual_ptr is not None:
        offs_r = (offs_m * stride_rm)[:, None] + offs_n[None, :]
        x += tl.load(residual_ptr + offs_r, mask=mask, other=0.0).to(tl.float32)
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
    """dots: (2, M) fp32, the means over a row of dy * weight * xhat and of dy * weight."""
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
def _norm_bwd_kernel(  # noqa: C901 - the branches are the compiler's, none is left at run time
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, stats_ptr, dots_ptr,
    dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr,
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
    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), programs, num_stages=STAGES):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        x = tl.load(x_ptr + (offs_m * stride_xm)[:, None] + offs_n[None, :], mask=mask, other=0.0)
        offs_dy = (offs_m * stride_dym)[:, None] + offs_n[None, :]
        dy = tl.load(dy_ptr + offs_dy, mask=mask, other=0.0).to(tl.float32)
        # 0 in rows past the end: whatever lies there must not reach dweight
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
        offs = (offs_m * N)[:, None] + offs_n[None, :]
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + offs, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
    part = pid.to(tl.int64) * N + offs_n
    if dweight_ptr is not None:
        tl.store(dweight_ptr + part, tl.sum(dweight, axis=0), mask=mask_n)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + part, tl.sum(dbias, axis=0), mask=mask_n)


@triton.jit(do_not_specialize=["P"])
def _norm_sum_kernel(
    dweight_parts_ptr, dbias_parts_ptr, dweight_ptr, dbias_ptr,
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the P partials of each column, always in the same order."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    dweight = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p < P)[:, None] & mask_n[None, :]
        offs = (offs_p.to(tl.int64) * N)[:, None] + offs_n[None, :]
        if dweight_ptr is not None:
            dweight += tl.load(dweight_parts_ptr + offs, mask=mask, other=0.0)
        if dbias_ptr is not None:
            dbias += tl.load(dbias_parts_ptr + offs, mask=mask, other=0.0)
    if dweight_ptr is not None:
        total = tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + offs_n, total, mask=mask_n)
    if dbias_ptr is not None:
        total = tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + offs_n, total, mask=mask_n)
