"""What the normalisations are proved and measured by."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..proof.compile import Case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def forms(arch: int) -> Iterator[Case]:
    """Every tile of the rule in its costliest form, fp32 and all options, and what GPTs launch."""
    for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384):
        yield form(n, FP32, FP32, residual=FP32)
    for n in (768, 1600, 4096):
        yield form(n, BF16, BF16, residual=BF16, bias=n != 4096)
        yield form(n, BF16, FP32)
    yield form(768, BF16, FP32, residual=FP32)
    yield form(768, BF16, FP32, centred=False, bias=False)
    yield form(768, FP16, FP32, residual=FP16)


def form(
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
        from .device import norm_bwd, norm_fwd

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
