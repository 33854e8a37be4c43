"""Rotary positions from the host: configuration, launcher, what is compiled ahead of time.

Shapes and names are those of `kernels.rotary_kernels`.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from kernels.aot_compile import Case
from kernels.rotary_kernels import _rotary_kernel
from kernels.runtime import launch

# --- configuration --------------------------------------------------------------------------------


def tile(H: int, K: int, D: int) -> dict[str, int]:
    """Block sizes: 1024 pairs, 8 a thread, of up to four heads, which share cosines and sines."""
    block_p = max(8, 1 << (D // 2 - 1).bit_length())
    block_h = 4 if max(H, K) > 2 else max(H, K)
    block_t = 1024 // (block_h * block_p)
    return {"BLOCK_T": block_t, "BLOCK_H": block_h, "BLOCK_P": block_p, "num_warps": 4}


# --- launcher -------------------------------------------------------------------------------------


def rotary_turn(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    *, interleaved: bool, conjugate: bool = False, inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(q, k) turned: contiguous, or with `inplace` themselves, whose last strides must be 1."""
    if not inplace:
        q, k = _pairs(q), None if k is None else _pairs(k)
    B, T, H, D = q.shape
    K = 0 if k is None else k.shape[2]
    q_out, k_out = (q, k) if inplace else (_like(q), None if k is None else _like(k))
    outs = (None, None) if inplace else (q_out, k_out)
    if B * T:
        config = tile(H, K, D)
        blocks = triton.cdiv(H, config["BLOCK_H"]) + triton.cdiv(K, config["BLOCK_H"])
        launch(
            _rotary_kernel, (blocks * B * triton.cdiv(T, config["BLOCK_T"]),),
            q, k, cos.contiguous(), sin.contiguous(), *outs,
            *q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]), T,
            H=H, K=K, D=D, INTERLEAVED=interleaved, CONJUGATE=conjugate, INPLACE=inplace, **config,
        )  # fmt: skip
    return q_out, k_out


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _pairs(x: Tensor) -> Tensor:
    """x, its last dimension contiguous: itself but for layouts hardly ever met."""
    return x if x.stride(3) == 1 else x.contiguous()


# --- what python -m kernels.aot compiles ----------------------------------------------------------


def aot_cases(arch: int) -> Iterator[Case]:
    """GPTs' head dimensions, both conventions, and in place."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for backward in (False, True):
        for D in (64, 128):
            yield _case(12, 12, D, bf16, conjugate=backward)
        yield _case(12, 12, 64, bf16, interleaved=True, conjugate=backward)
    yield _case(12, 4, 64, bf16, inplace=True)
    yield _case(12, 4, 80, torch.float16)
    yield _case(8, 1, 256, fp32, interleaved=True)


def _case(H: int, K: int, D: int, dtype: torch.dtype, **options: bool) -> Case:
    def run() -> None:
        qkv = torch.empty(4, 1024, H + 2 * K, D, dtype=dtype, device="meta")
        q, k, _ = qkv.split((H, K, K), dim=2)
        cos = torch.empty(1024, D // 2, device="meta")
        rotary_turn(q, k, cos, cos, **{"interleaved": False, **options})

    label = [f"H={H} K={K} D={D} {str(dtype).removeprefix('torch.')}"]
    label += [name for name, on in options.items() if on]
    return Case(" ".join(label), run)
