"""LayerNorm and RMSNorm from the host: configurations, launchers, what is compiled ahead of time.

Shapes and names are those of `kernels.norm_kernels`.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from kernels.aot_compile import Case
from kernels.norm_kernels import (
    _norm_bwd_kernel,
    _norm_dots_kernel,
    _norm_fwd_kernel,
    _norm_sum_kernel,
)
from kernels.runtime import launch, multiprocessors

# --- configurations -------------------------------------------------------------------------------

# Above it the backward's row, with both accumulators, does not fit the registers of 1024 threads.
WHOLE_ROW = 8_192
PART_N = 2_048


def fwd_tile(n: int) -> dict[str, int]:
    """Block sizes and warps of the forward: about 4096 elements, 16 a thread.

    A rule and not a table, here and below: N alone sets the sizes, the registers that
    `python -m kernels.aot` counts set the rest, and a table would only repeat it for every N.
    """
    block_n, block_m = _blocks(n, 4096)
    warps = max(1, min(32, block_m * block_n // (16 * 32)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}


def bwd_tile(n: int) -> dict[str, int]:
    """Block sizes, warps and loads in flight of the backward: 8 elements a thread, 16 at N=8192.

    With both accumulators and the weight that takes 64 to 118 registers on sm_90; with twice the
    elements a thread it takes 128 or spills. Three loads in flight of 8192 fp32 elements and three
    inputs would not fit sm_80's shared memory.
    """
    block_n, block_m = _blocks(n, 1024 if n <= 512 else 2048)
    warps = max(1, min(16, block_m * block_n // (8 * 32)))
    stages = 3 if block_n <= 4096 else 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "STAGES": stages}


def bwd_programs(device: torch.device, warps: int) -> int:
    """As many as run at once at 128 registers a thread: 16 warps a multiprocessor."""
    return multiprocessors(device) * max(1, 16 // warps)


def _blocks(n: int, elements: int) -> tuple[int, int]:
    block_n = max(64, 1 << (n - 1).bit_length())  # no narrower: a size more is one more to prove
    return block_n, max(1, min(16, elements // block_n))


# --- launchers ------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """x as (M, N) with contiguous columns: a view wherever strides allow it, else a copy."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y of `dtype`, total, stats); total is empty where there is no residual."""
    N = x.shape[-1]
    M = x.numel() // N
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    summed = () if residual is None else (x.dtype, residual.dtype)
    total = torch.empty(
        x.shape if summed else 0,
        dtype=torch.promote_types(*summed) if summed else dtype,
        device=x.device,
    )
    stats = torch.empty((2 if centred else 1, M), dtype=torch.float32, device=x.device)
    if M == 0:
        return y, total, stats
    x = _rows(x)
    residual = None if residual is None else _rows(residual)
    config = fwd_tile(N)
    launch(
        _norm_fwd_kernel, (triton.cdiv(M, config["BLOCK_M"]),),
        x, residual, _vector(weight), _vector(bias), y, total if summed else None, stats,
        x.stride(0), 0 if residual is None else residual.stride(0),
        M, N, EPS=eps, CENTRED=centred, **config,
    )  # fmt: skip
    return y, total, stats


def _vector(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def norm_bwd(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    dx_dtype: torch.dtype,
    dresidual_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight, dbias); x is what was normalised, a dtype of None gives an empty.

    dresidual equals dx but for its dtype.
    """
    N = x.shape[-1]
    M = x.numel() // N

    def empty(dtype: torch.dtype | None, *shape: int) -> Tensor:
        shape = (0,) if dtype is None else shape
        return torch.empty(shape, dtype=dtype or torch.float32, device=x.device)

    dx, dresidual = empty(dx_dtype, *x.shape), empty(dresidual_dtype, *x.shape)
    dweight, dbias = empty(dweight_dtype, N), empty(dbias_dtype, N)
    if M == 0:
        return dx, dresidual, dweight.zero_(), dbias.zero_()
    centred = len(stats) == 2
    dy, x, weight = _rows(dy), _rows(x), _vector(weight)
    dtotal = None if dtotal is None else _rows(dtotal)
    dots = None
    if N > WHOLE_ROW:
        dots = empty(torch.float32, 2, M)
        launch(
            _norm_dots_kernel, (M,),
            dy, x, weight, stats, dots, dy.stride(0), x.stride(0), M, N,
            CENTRED=centred, BLOCK_N=PART_N, num_warps=8,
        )  # fmt: skip
    config = bwd_tile(N if dots is None else PART_N)
    parts_n = triton.cdiv(N, config["BLOCK_N"])
    programs = max(1, bwd_programs(x.device, config["num_warps"]) // parts_n)
    programs = min(programs, triton.cdiv(M, config["BLOCK_M"]))
    dweight_parts = empty(dweight_dtype and torch.float32, programs, N)
    dbias_parts = empty(dbias_dtype and torch.float32, programs, N)
    launch(
        _norm_bwd_kernel, (programs, parts_n),
        dy, dtotal, x, weight, stats, dots,
        dx, _wanted(dresidual), _wanted(dweight_parts), _wanted(dbias_parts),
        dy.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0),
        M, N, CENTRED=centred, **config,
    )  # fmt: skip
    if dweight_dtype or dbias_dtype:
        launch(
            _norm_sum_kernel, (triton.cdiv(N, 32),),
            dweight_parts, dbias_parts, _wanted(dweight), _wanted(dbias), programs, N,
            BLOCK_P=64, BLOCK_N=32, num_warps=8,
        )  # fmt: skip
    return dx, dresidual, dweight, dbias


def _wanted(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


# --- what python -m kernels.aot compiles ----------------------------------------------------------

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def aot_cases(arch: int) -> Iterator[Case]:
    """Every tile of the rule in its costliest form, fp32 and all options, and what GPTs launch."""
    for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384):
        yield _case(n, FP32, FP32, residual=FP32)
    for n in (768, 1600, 4096):
        yield _case(n, BF16, BF16, residual=BF16, bias=n != 4096)
        yield _case(n, BF16, FP32)
    yield _case(768, BF16, FP32, residual=FP32)
    yield _case(768, BF16, FP32, centred=False, bias=False)
    yield _case(768, FP16, FP32, residual=FP16)


def _case(
    n: int,
    dtype: torch.dtype,
    weight: torch.dtype,
    residual: torch.dtype | None = None,
    *,
    bias: bool = True,
    centred: bool = True,
) -> Case:
    def make(dtype: torch.dtype | None, *shape: int) -> Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")

    def run() -> None:
        x = y = torch.empty(4096, n, dtype=dtype, device="meta")
        w, b = make(weight, n), make(weight if bias else None, n)
        r = make(residual, 4096, n)
        _, total, stats = norm_fwd(x, r, w, b, 1e-5, centred, dtype)
        saved, other = (x, None) if r is None else (total, residual if residual != dtype else None)
        dtotal = None if r is None else total
        norm_bwd(y, dtotal, saved, stats, w, dtype, other, weight, weight if bias else None)

    names = {BF16: "bf16", FP16: "fp16", FP32: "fp32", None: ""}
    parts = ["layer" if centred else "rms", f"N={n} {names[dtype]} weight={names[weight]}"]
    parts += ["bias"] * bias + [f"residual={names[residual]}"] * (residual is not None)
    return Case(" ".join(parts), run)
