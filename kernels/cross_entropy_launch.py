"""Launchers of the cross-entropy kernels, their configurations, and what is compiled of them."""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from kernels.aot_compile import Case
from kernels.cross_entropy_kernels import (
    _cross_entropy_bwd_kernel,
    _cross_entropy_fwd_kernel,
    _cross_entropy_scale_kernel,
)
from kernels.cross_entropy_plain import Options
from kernels.runtime import launch, multiprocessors

# --- configurations -------------------------------------------------------------------------------

BLOCK_N = 4096


def tile(V: int, itemsize: int) -> dict[str, int]:
    """Lanes, elements a lane and warps of the forward over rows of `V`.

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


def _constants(options: Options) -> dict[str, object]:
    return {
        "IGNORE_INDEX": options.ignore_index,
        "LABEL_SMOOTHING": options.label_smoothing,
        "Z_LOSS": options.z_loss,
        "SOFTCAP": options.softcap,
    }


def cross_entropy_fwd(logits: Tensor, targets: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(losses, stats) of logits whose columns are contiguous."""
    M, V = logits.shape
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    stats = torch.empty((2, M), dtype=torch.float32, device=logits.device)
    if M:
        launch(
            _cross_entropy_fwd_kernel, (M,),
            logits, targets, losses, stats, None, None, logits.stride(0), 0,
            M, V, options.valid_vocab, **_constants(options), **tile(V, logits.element_size()),
        )  # fmt: skip
    return losses, stats


def cross_entropy_fwd_bwd_(
    logits: Tensor, targets: Tensor, scale: Tensor | None, options: Options
) -> Tensor:
    """Losses; the gradient of their sum, times `scale`, takes the place of the logits."""
    M, V = logits.shape
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    if M:
        launch(
            _cross_entropy_fwd_kernel, (M,),
            logits, targets, losses, None, scale, logits, logits.stride(0), _step(scale),
            M, V, options.valid_vocab, **_constants(options), **tile(V, logits.element_size()),
        )  # fmt: skip
    return losses


def cross_entropy_bwd(
    logits: Tensor, targets: Tensor, stats: Tensor, scale: Tensor, dlogits: Tensor, options: Options
) -> None:
    """Writes the gradient of the losses' sum, times `scale`, to dlogits: the logits or another."""
    M, V = logits.shape
    if M:
        block = min(BLOCK_N, 1 << (V - 1).bit_length())
        launch(
            _cross_entropy_bwd_kernel, (M, triton.cdiv(V, block)),
            logits, targets, stats, scale, dlogits, logits.stride(0), _step(scale),
            dlogits.stride(0), M, V, options.valid_vocab, **_constants(options), BLOCK_N=block,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip


def cross_entropy_scale_(dlogits: Tensor, scale: Tensor) -> None:
    """dlogits *= scale (), unless it is 1, which the device alone knows."""
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


# --- ahead of time --------------------------------------------------------------------------------


def aot_cases(arch: int) -> Iterator[Case]:
    """Each tile of the rule, and what changes the code: options, padding, unaligned rows."""
    every = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}
    for dtype in (torch.bfloat16, torch.float32):
        for V in (256, 2048, 50_304, 128_256):
            yield from _cases(V, dtype, **every)
    yield from _cases(50_304, torch.bfloat16)
    yield from _cases(50_304, torch.float16, valid=50_257)
    yield from _cases(50_304, torch.bfloat16, valid=50_257)
    yield from _cases(50_257, torch.bfloat16)  # rows that are not aligned


def _cases(V: int, dtype: torch.dtype, valid: int | None = None, **values: float) -> Iterator[Case]:
    options = Options(valid or V, **values)
    logits = torch.empty(4096, V, dtype=dtype, device="meta")
    targets = torch.empty(4096, dtype=torch.int64, device="meta")
    scale = torch.empty((), device="meta")

    def apart() -> None:
        _, stats = cross_entropy_fwd(logits, targets, options)
        cross_entropy_bwd(logits, targets, stats, scale, logits, options)

    def in_place() -> None:
        cross_entropy_fwd_bwd_(logits, targets, scale, options)
        if valid is None:
            cross_entropy_scale_(logits, scale)

    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    label = " ".join([f"V={V} {kind}", *[f"valid={valid}"] * bool(valid), *values])
    yield Case(label, apart)
    yield Case(f"{label} in place", in_place)
