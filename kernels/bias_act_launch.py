"""Bias and activation from the host: configurations, launchers, what is compiled ahead of time.

Shapes and names are those of `kernels.bias_act_kernels`.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from kernels.aot_compile import Case
from kernels.bias_act_kernels import _bias_act_bwd_kernel, _bias_act_fwd_kernel
from kernels.norm_kernels import _norm_sum_kernel
from kernels.norm_launch import _blocks, _rows
from kernels.runtime import launch, multiprocessors

# --- configurations -------------------------------------------------------------------------------

MOST_N = 1024


def fwd_tile(F: int) -> dict[str, int]:
    """Block sizes and warps of the forward: 16 elements a thread, in bf16 two loads of 16 bytes."""
    return _tile(F, 2048, 16)


def bwd_tile(F: int, kind: str) -> dict[str, int]:
    """Of the backward: 8 elements a thread, so that 4 programs of 8 warps fit a multiprocessor.

    At most 60 registers are used, by swiglu, with two sums and two biases, 98 where nothing bounds
    them; bounded to 80 it spills none, and 3 programs fit.
    """
    return {**_tile(F, 2048, 8), "maxnreg": 80 if kind == "swiglu" else 64}


def bwd_programs(device: torch.device, config: dict[str, int]) -> int:
    """As many as run at once."""
    return multiprocessors(device) * (2048 // (config["maxnreg"] * config["num_warps"]))


def _tile(F: int, elements: int, each: int) -> dict[str, int]:
    block_n, block_m = _blocks(min(F, MOST_N), elements)
    warps = max(1, block_m * block_n // (each * 32))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}


# --- launchers ------------------------------------------------------------------------------------


def bias_act_fwd(x: Tensor, bias: Tensor | None, kind: str, dtype: torch.dtype) -> Tensor:
    """y of `dtype`, contiguous."""
    F = x.shape[-1] // (2 if kind == "swiglu" else 1)
    M = x.numel() // x.shape[-1]
    y = torch.empty((*x.shape[:-1], F), dtype=dtype, device=x.device)
    if M:
        x, config = _rows(x), fwd_tile(F)
        launch(
            _bias_act_fwd_kernel,
            (triton.cdiv(M, config["BLOCK_M"]), triton.cdiv(F, config["BLOCK_N"])),
            x, None if bias is None else bias.contiguous(), y,
            x.stride(0), M, F, KIND=kind, **config,
        )  # fmt: skip
    return y


def bias_act_bwd(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, dbias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """(dx, dbias); dbias is empty where its dtype is None."""
    N = x.shape[-1]
    F = N // (2 if kind == "swiglu" else 1)
    M = x.numel() // N
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbias = torch.empty(
        0 if dbias_dtype is None else N, dtype=dbias_dtype or torch.float32, device=x.device
    )
    if M == 0:
        return dx, dbias.zero_()
    dy, x, config = _rows(dy), _rows(x), bwd_tile(F, kind)
    parts_n = triton.cdiv(F, config["BLOCK_N"])
    programs = max(1, bwd_programs(x.device, config) // parts_n)
    programs = min(programs, triton.cdiv(M, config["BLOCK_M"]))
    parts = None
    if dbias_dtype is not None:
        parts = torch.empty(programs, N, dtype=torch.float32, device=x.device)
    launch(
        _bias_act_bwd_kernel, (programs, parts_n),
        dy, x, None if bias is None else bias.contiguous(), dx, parts,
        dy.stride(0), x.stride(0), M, F, KIND=kind, **config,
    )  # fmt: skip
    if parts is not None:
        launch(
            _norm_sum_kernel, (triton.cdiv(N, 32),),
            parts, parts, None, dbias, programs, N, BLOCK_P=64, BLOCK_N=32, num_warps=8,
        )  # fmt: skip
    return dx, dbias


# --- what python -m kernels.aot compiles ----------------------------------------------------------

BF16, FP32 = torch.bfloat16, torch.float32


def aot_cases(arch: int) -> Iterator[Case]:
    """What GPTs launch; relu is relu_squared without the square. The costliest kind in fp32."""
    for kind in ("gelu_tanh", "gelu_erf", "relu_squared"):
        yield _case(kind, 3072, BF16, FP32)
    yield _case("swiglu", 2048, BF16, FP32)
    yield _case("swiglu", 2048, BF16, None)
    for F in (16, 128, 1024):
        yield _case("swiglu", F, FP32, FP32)


def _case(kind: str, F: int, dtype: torch.dtype, bias: torch.dtype | None) -> Case:
    def run() -> None:
        N = 2 * F if kind == "swiglu" else F
        x = torch.empty(4096, N, dtype=dtype, device="meta")
        b = torch.empty(N, dtype=bias, device="meta") if bias else None
        y = bias_act_fwd(x, b, kind, dtype)
        bias_act_bwd(y, x, b, kind, bias)

    names = {BF16: "bf16", FP32: "fp32", None: "none"}
    return Case(f"{kind} F={F} {names[dtype]} bias={names[bias]}", run)
