"""Triton kernels for bias and activation, forward and backward.

Shapes
    M = rows, F = features of the output.  x, dx: (M, F), for swiglu (M, 2F) with the gate first
    bias: (F,) or (2F,)   y, dy: (M, F)
    P = programs of the backward that share a block of columns; partials of dbias: (P, F) or (P, 2F)
The derivatives are in docs/kernels/bias_act.md.

A pointer that is None is a constant to the compiler. M is never specialised and no pointer depends
on it: no recompile when it changes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import as_rows, row_blocks, row_programs
from ..runtime import launch, multiprocessors

LOG2E = tl.constexpr(1.4426950408889634)
PHI_0 = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
GELU = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def _tail(z):
    """Computes erfc(z / sqrt(2)) / 2 over exp(-z^2 / 2), for z >= 0: the product is within 3e-7.

    It takes half of libdevice's instructions, and the derivative needs the exponential as well.
    Source: Abramowitz & Stegun 1964, 7.1.26.
    """
    t = 1 / (1 + 0.23164189 * z)
    return t * (
        0.127414796
        + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    )


@triton.jit
def _act(z, KIND: tl.constexpr):
    """Returns the activation of z and its derivative; for swiglu those of the gate's half.

    The compiler removes the one that is not used.
    """
    if KIND == "relu" or KIND == "relu_squared":
        y = tl.where(z <= 0, 0.0, z)  # NaN stays, as in torch
        slope = tl.where(z <= 0, 0.0, 1.0)
        if KIND == "relu_squared":
            slope = 2 * y
            y *= y
    elif KIND == "gelu_erf":
        bell = tl.exp2(z * z * (-0.5 * LOG2E))
        tail = _tail(tl.abs(z)) * bell
        share = tl.where(z < 0, tail, 1 - tail)
        y = z * share
        slope = share + z * (bell * PHI_0)
    else:  # z sigmoid(z) or, because (1 + tanh(u)) / 2 = sigmoid(2 u), z sigmoid(cubic in z)
        inner = z
        if KIND == "gelu_tanh":
            inner = z * (GELU + GELU * GELU_CUBE * z * z)
        share = 1 / (1 + tl.exp2(inner * -LOG2E))
        y = z * share
        slope = y * (1 - share)
        if KIND == "gelu_tanh":
            slope *= GELU + 3 * GELU * GELU_CUBE * z * z
        slope += share
    return y, slope


@triton.jit
def _part(ptr, offs_m, offs_n, stride, mask):
    """Loads a block of numbers as fp32; 0 where masked."""
    offs = (offs_m * stride)[:, None] + offs_n[None, :]
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _bias(ptr, offs_n, mask_n):
    if ptr is None:
        return 0.0
    else:  # noqa: RET505 - Triton's compiler needs the else
        # kept in L1: every block of rows reads it, while x is read once
        bias = tl.load(ptr + offs_n, mask_n, 0.0, eviction_policy="evict_last")
        return bias.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["M"])
def _bias_act_fwd_kernel(
    x_ptr, bias_ptr, y_ptr,
    stride_xm,
    M, F,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < F
    mask = (offs_m < M)[:, None] & mask_n[None, :]
    z = _part(x_ptr, offs_m, offs_n, stride_xm, mask) + _bias(bias_ptr, offs_n, mask_n)
    y, _ = _act(z, KIND)
    if KIND == "swiglu":
        up = _part(x_ptr, offs_m, F + offs_n, stride_xm, mask)
        y *= up + _bias(bias_ptr, F + offs_n, mask_n)
    offs = (offs_m * F)[:, None] + offs_n[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _bias_act_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr,
    stride_dym, stride_xm,
    M, F,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid, programs = tl.program_id(0), tl.num_programs(0)
    width = 2 * F if KIND == "swiglu" else F
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < F
    bias = _bias(bias_ptr, offs_n, mask_n)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if KIND == "swiglu":
        bias_up = _bias(bias_ptr, F + offs_n, mask_n)
        dbias_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(pid, tl.cdiv(M, BLOCK_M), programs):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (offs_m < M)[:, None] & mask_n[None, :]
        dy = _part(dy_ptr, offs_m, offs_n, stride_dym, mask)
        y, slope = _act(_part(x_ptr, offs_m, offs_n, stride_xm, mask) + bias, KIND)
        offs = (offs_m * width)[:, None] + offs_n[None, :]
        dz = dy * slope  # 0 where masked, because dy is
        if KIND == "swiglu":
            dz *= _part(x_ptr, offs_m, F + offs_n, stride_xm, mask) + bias_up
            dup = dy * y
            tl.store(dx_ptr + F + offs, dup.to(dx_ptr.dtype.element_ty), mask=mask)
            dbias_up += dup
        tl.store(dx_ptr + offs, dz.to(dx_ptr.dtype.element_ty), mask=mask)
        dbias += dz
    if dbias_ptr is not None:
        part = pid.to(tl.int64) * width + offs_n
        tl.store(dbias_ptr + part, tl.sum(dbias, axis=0), mask=mask_n)
        if KIND == "swiglu":
            tl.store(dbias_ptr + F + part, tl.sum(dbias_up, axis=0), mask=mask_n)


MOST_N = 1024


def fwd_tile(F: int) -> dict[str, int]:
    """Block sizes and warps of the forward: 16 elements a thread, in bf16 two loads of 16 bytes."""
    return _tile(F, 2048, 16)


def bwd_tile(F: int, kind: str) -> dict[str, int]:
    """Block sizes and warps of the backward: 8 elements a thread, 4 programs a multiprocessor.

    At most 60 registers are used, by swiglu with two sums and two biases. Without a bound it takes
    98; bounded to 80 it spills none, and 3 programs fit.
    """
    return {**_tile(F, 2048, 8), "maxnreg": 80 if kind == "swiglu" else 64}


def bwd_programs(device: torch.device, config: dict[str, int]) -> int:
    """Returns the number of programs that the backward runs at once."""
    return multiprocessors(device) * (2048 // (config["maxnreg"] * config["num_warps"]))


def _tile(F: int, elements: int, each: int) -> dict[str, int]:
    block_n, block_m = row_blocks(min(F, MOST_N), elements)
    warps = max(1, block_m * block_n // (each * 32))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}


def bias_act_fwd(x: Tensor, bias: Tensor | None, kind: str, dtype: torch.dtype, y: Tensor) -> None:
    """Runs the forward kernel: writes y."""
    F = y.shape[-1]
    M = x.numel() // x.shape[-1]
    if M:
        x, config = as_rows(x), fwd_tile(F)
        launch(
            _bias_act_fwd_kernel,
            (triton.cdiv(M, config["BLOCK_M"]), triton.cdiv(F, config["BLOCK_N"])),
            x, None if bias is None else bias.contiguous(), y,
            x.stride(0), M, F, KIND=kind, **config,
        )  # fmt: skip


def bwd_plan(M: int, F: int, kind: str, device: torch.device) -> tuple[dict[str, int], int, int]:
    """Returns how the backward runs: tile, programs (0 without rows) and parts of the columns."""
    config = bwd_tile(F, kind)
    return config, *row_programs(M, F, config, bwd_programs(device, config))


def bias_act_bwd(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, wanted: bool, dx: Tensor, parts: Tensor
) -> None:
    """Runs the backward kernel: writes dx, and partial sums of dbias if they are wanted."""
    F = dy.shape[-1]
    M = x.numel() // x.shape[-1]
    if M:
        config, programs, parts_n = bwd_plan(M, F, kind, x.device)
        dy, x = as_rows(dy), as_rows(x)
        launch(
            _bias_act_bwd_kernel, (programs, parts_n),
            dy, x, None if bias is None else bias.contiguous(), dx, parts if wanted else None,
            dy.stride(0), x.stride(0), M, F, KIND=kind, **config,
        )  # fmt: skip
