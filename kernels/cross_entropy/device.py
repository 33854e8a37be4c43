"""Triton kernels for cross-entropy: loss and statistics, gradient, or both in one pass.

Shapes
    M = rows, V = columns, of which `valid` count.  logits, dlogits: (M, V)   targets: (M,) integers
    losses: (M,) fp32   stats: (2, M) fp32, the largest logit and log sum exp(logit - largest)
    scale: () or (M,) fp32, by which a row's gradient is multiplied
The math is derived in docs/kernels/cross_entropy.md.

One program a row. Each of its lanes keeps a largest logit and a sum of its own, over ROWS x LANES
elements at a time: what is rescaled, and what lanes tell each other, is then a small part of the
work. The largest logit is subtracted before anything is rounded, so that logits of 1e4 lose nothing
but what their own dtype has lost. Rows of ignored targets are not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..rows import as_rows
from ..runtime import launch, multiprocessors
from .plain import SHRINK, LossOptions

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, because -inf - -inf is NaN
SMALLER = tl.constexpr(SHRINK)

# --- device ---------------------------------------------------------------------------------------


@triton.jit
def _tanh(x):
    """Computes tanh to a relative error of 3e-7; exp(x) - exp(-x) alone would lose every digit near
    0.
    """
    u = tl.exp2(x * (2 * LOG2E))
    far = 1 - 2 / (u + 1)
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(y < 0.0625, near, far)


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    if SOFTCAP is None:
        return x
    else:  # noqa: RET505 - Triton's compiler needs the else
        return SOFTCAP * _tanh(x * (1 / SOFTCAP))


@triton.jit
def _column_of(targets_ptr, row, valid, IGNORE_INDEX: tl.constexpr):
    """Returns a row's target; -1 if it is ignored, -2 if it is outside of the vocabulary."""
    target = tl.load(targets_ptr + row).to(tl.int64)
    column = tl.where((target >= 0) & (target < valid), target, -2)
    return tl.where(target == IGNORE_INDEX, -1, column).to(tl.int32)


@triton.jit
def _scale(scale_ptr, row, stride_sm, target):
    """Returns the factor on a row's gradient; NaN for a target outside of the vocabulary."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row * stride_sm).to(tl.float32)
    return tl.where(target >= 0, scale, float("nan"))


@triton.jit
def _gradient(x, top, coefficient, taken, SOFTCAP: tl.constexpr):
    """Computes the gradient of logit x: its probability times `coefficient`, minus `taken`."""
    z = _capped(x, SOFTCAP)
    g = tl.exp2((z - top) * LOG2E) * coefficient - taken
    if SOFTCAP is not None:
        tanh = z * (1 / SOFTCAP)
        g *= 1 - tanh * tanh
    return g


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["targets_ptr", "scale_ptr"])
def _cross_entropy_fwd_kernel(  # noqa: C901, PLR0915 - the compiler resolves the branches
    logits_ptr, targets_ptr, losses_ptr, stats_ptr, scale_ptr, dlogits_ptr,
    stride_lm, stride_sm,
    M, V, valid,
    IGNORE_INDEX: tl.constexpr, LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = _column_of(targets_ptr, row, valid, IGNORE_INDEX)
    kept = target != -1
    logits_ptr += row * stride_lm
    picked = tl.load(logits_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
    capped = _capped(picked, SOFTCAP)
    below = tl.maximum(capped, LOWEST) * SMALLER
    tops = tl.full((LANES,), LOWEST, tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    above = tl.zeros((LANES,), tl.float32)  # logits above the target's, times SMALLER
    whole = tl.where(kept, valid // (ROWS * LANES) * (ROWS * LANES), 0)
    for rest in tl.static_range(2):  # unmasked blocks, then masked single elements
        rows = tl.arange(0, 1 if rest else ROWS)
        offs = rows[:, None] * LANES + tl.arange(0, LANES)[None, :]
        end = tl.where(kept, valid, 0) if rest else whole
        for start in range(whole if rest else 0, end, LANES if rest else ROWS * LANES):
            cols = start + offs
            # V, not `valid`, bounds the reads: a bound inside a vector would make 8 loads of
            # it; a gradient in place reads the logits again, so they should stay in L2
            if rest:
                x = tl.load(logits_ptr + cols, mask=cols < V, other=0.0)
            else:
                x = tl.load(logits_ptr + cols, eviction_policy="evict_last")
            z = _capped(x.to(tl.float32), SOFTCAP)
            if rest:
                z = tl.where(cols < valid, z, float("-inf"))
            higher = tl.maximum(tops, tl.max(z, axis=0))
            exps = tl.exp2((z - higher[None, :]) * LOG2E)
            sums = sums * tl.exp2((tops - higher) * LOG2E) + tl.sum(exps, axis=0)
            tops = higher
            if LABEL_SMOOTHING != 0.0:
                over = z * SMALLER - below
                if rest:
                    over = tl.where(cols < valid, over, 0.0)
                above += tl.sum(over, axis=0)
    top = tl.max(tops, axis=0)
    total = tl.sum(sums * tl.exp2((tops - top) * LOG2E), axis=0)
    logsum = tl.log(total)
    loss = logsum + (top - capped)
    if LABEL_SMOOTHING != 0.0:
        loss -= LABEL_SMOOTHING / SMALLER * (tl.sum(above, axis=0) / valid)
    lse = top + logsum
    if Z_LOSS != 0.0:
        loss += Z_LOSS * lse * lse
    tl.store(losses_ptr + row, tl.where(target >= 0, loss, tl.where(kept, float("nan"), 0.0)))
    if stats_ptr is not None:
        tl.store(stats_ptr + row, top)
        tl.store(stats_ptr + M + row, logsum)
    if dlogits_ptr is not None:
        dlogits_ptr += row * stride_lm
        kind = dlogits_ptr.dtype.element_ty
        scale = _scale(scale_ptr, row, stride_sm, target)
        coefficient = scale * (1 + 2 * Z_LOSS * lse) / total
        evenly = scale * (LABEL_SMOOTHING / valid)
        # dlogits may be the logits: no thread writes before every thread has read its target
        tl.debug_barrier()
        for rest in tl.static_range(2):
            rows = tl.arange(0, 1 if rest else ROWS)
            offs = rows[:, None] * LANES + tl.arange(0, LANES)[None, :]
            end = V if rest else whole
            for start in range(whole if rest else 0, end, LANES if rest else ROWS * LANES):
                cols = start + offs
                if rest:
                    x = tl.load(logits_ptr + cols, mask=cols < tl.where(kept, V, 0), other=0.0)
                else:
                    x = tl.load(logits_ptr + cols, eviction_policy="evict_first")
                g = _gradient(x.to(tl.float32), top, coefficient, evenly, SOFTCAP)
                if rest:
                    g = tl.where(cols < tl.where(kept, valid, 0), g, 0.0)
                    tl.store(dlogits_ptr + cols, g.to(kind), mask=cols < V)
                else:
                    tl.store(dlogits_ptr + cols, g.to(kind), eviction_policy="evict_first")
        # the target's entry is rewritten last: one comparison less for every element
        tl.debug_barrier()
        g = _gradient(picked, top, coefficient, evenly + scale * (1 - LABEL_SMOOTHING), SOFTCAP)
        tl.store(dlogits_ptr + target, g.to(kind), mask=target >= 0)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["targets_ptr", "scale_ptr"])
def _cross_entropy_bwd_kernel(
    logits_ptr, targets_ptr, stats_ptr, scale_ptr, dlogits_ptr,
    stride_lm, stride_sm, stride_dm,
    M, V, valid,
    IGNORE_INDEX: tl.constexpr, LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    target = _column_of(targets_ptr, row, valid, IGNORE_INDEX)
    kept = target != -1
    scale = _scale(scale_ptr, row, stride_sm, target)
    top = tl.load(stats_ptr + row)
    logsum = tl.load(stats_ptr + M + row)
    coefficient = scale * (1 + 2 * Z_LOSS * (top + logsum)) * tl.exp2(-logsum * LOG2E)
    taken = tl.where(cols == target, scale * (1 - LABEL_SMOOTHING), 0.0)
    taken += scale * (LABEL_SMOOTHING / valid)
    read = cols < tl.where(kept, V, 0)
    x = tl.load(logits_ptr + row * stride_lm + cols, mask=read, other=0.0)
    g = _gradient(x.to(tl.float32), top, coefficient, taken, SOFTCAP)
    g = tl.where(cols < tl.where(kept, valid, 0), g, 0.0).to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + row * stride_dm + cols, g, mask=cols < V)


@triton.jit(do_not_specialize=["M"])
def _cross_entropy_scale_kernel(dlogits_ptr, scale_ptr, stride_dm, M, V, BLOCK_N: tl.constexpr):
    """Computes dlogits *= scale; skips a scale of 1, which a loss that is the graph's root has."""
    scale = tl.load(scale_ptr).to(tl.float32)
    for row in range(tl.program_id(0), tl.where(scale == 1, 0, M), tl.num_programs(0)):
        ptr = dlogits_ptr + tl.cast(row, tl.int64) * stride_dm
        for start in range(0, V, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            g = tl.load(ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
            tl.store(ptr + cols, (g * scale).to(dlogits_ptr.dtype.element_ty), mask=cols < V)


# --- configurations -------------------------------------------------------------------------------

BLOCK_N = 4096


def tile(V: int, itemsize: int) -> dict[str, int]:
    """Block sizes and warps of the forward over rows of `V` logits.

    Sixteen warps of 64 registers a thread are two programs a multiprocessor: rows in flight are
    2 x 132 x 100 KB at V = 50304 in bf16, which half of an H200's L2 holds until the gradient reads
    them again. Longer rows get one program of 32 warps. The bound on registers is more than is
    used: without one, ptxas spills 8 bytes to make room for a third program.
    """
    lane = 16 // itemsize
    most = 16 if V * itemsize <= 1 << 17 else 32
    warps = min(most, max(1, (1 << (V - 1).bit_length()) // (32 * lane)))
    lanes = warps * 32 * lane
    rows = max(1, min(8192 // lanes, (1 << (V - 1).bit_length()) // lanes))
    return {"ROWS": rows, "LANES": lanes, "num_warps": warps, "maxnreg": min(128, 2048 // warps)}


# --- launchers ------------------------------------------------------------------------------------


def _constants(options: LossOptions) -> dict[str, object]:
    names = ("IGNORE_INDEX", "LABEL_SMOOTHING", "Z_LOSS", "SOFTCAP")
    return dict(zip(names, options[1:], strict=True))


def cross_entropy_fwd(
    logits: Tensor, targets: Tensor, options: LossOptions, losses: Tensor,
    stats: Tensor | None = None, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Runs the forward kernel: writes the losses (M,), and the softmax statistics of each row.

    Without `stats` it overwrites the logits with their gradients times `scale` in the same pass.
    Then the columns of the logits must be contiguous.
    """
    M, V = logits.shape
    logits, targets = as_rows(logits), targets.contiguous()
    if M:
        launch(
            _cross_entropy_fwd_kernel, (M,),
            logits, targets, losses, stats, scale, logits if stats is None else None,
            logits.stride(0), _step(scale), M, V, options.valid_vocab, **_constants(options),
            **tile(V, logits.element_size()),
        )  # fmt: skip


def cross_entropy_bwd(
    logits: Tensor, targets: Tensor, stats: Tensor, scale: Tensor, dlogits: Tensor,
    options: LossOptions,
) -> None:  # fmt: skip
    """Runs the backward kernel: writes the gradient to dlogits, which may be the logits."""
    M, V = logits.shape
    logits, targets = as_rows(logits), targets.contiguous()
    if M:
        block = min(BLOCK_N, 1 << (V - 1).bit_length())
        launch(
            _cross_entropy_bwd_kernel, (M, triton.cdiv(V, block)),
            logits, targets, stats, scale, dlogits, logits.stride(0), _step(scale),
            dlogits.stride(0), M, V, options.valid_vocab, **_constants(options), BLOCK_N=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip


def cross_entropy_scale_(dlogits: Tensor, scale: Tensor) -> None:
    """Computes dlogits *= scale (); a factor of 1 is skipped on the device, without a host sync."""
    M, V = dlogits.shape
    if M:
        programs = min(M, 8 * multiprocessors(dlogits.device))
        block = min(BLOCK_N, 1 << (V - 1).bit_length())
        launch(
            _cross_entropy_scale_kernel, (programs,),
            dlogits, scale, dlogits.stride(0), M, V, BLOCK_N=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip


def _step(scale: Tensor | None) -> int:
    return scale.stride(0) if scale is not None and scale.dim() else 0
