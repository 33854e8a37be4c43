"""What `decode_attention` is proved and measured by."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..proof.compile import Case


def forms(arch: int) -> Iterator[Case]:
    """The tile of each head dimension and dtype in its forms: split or not, paged, with starts."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for D in (16, 64, 80, 128, 256):
        yield form(D, bf16)
    yield form(64, bf16, B=1, Tq=4, H=32, K=8)
    yield form(256, fp32, B=1)
    for D, dtype in ((64, bf16), (128, bf16), (256, bf16), (64, fp32), (256, fp32)):
        yield form(D, dtype, B=4, Tq=4, H=32, K=4, page=16, starts=True)


def form(
    D: int, dtype: torch.dtype, *, B: int = 64, Tq: int = 1, H: int = 12, K: int = 12,
    page: int = 0, starts: bool = False,
) -> Case:  # fmt: skip
    T = 4096

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run() -> None:
        from .device import decode_attention_fwd

        shape = (B * T // page, page, K, D) if page else (B, T, K, D)
        table = make(B, T // page, dtype=torch.int32) if page else None
        first = make(B, Tq, dtype=torch.int64) if starts else None
        lengths = make(B, dtype=torch.int64)
        q, k, v = make(B, Tq, H, D), make(*shape), make(*shape)
        decode_attention_fwd(q, k, v, lengths, first, table, D**-0.5)

    mma: dict[str, Any] = {} if dtype is torch.float32 else {"_decode_attention_kernel": "HMMA"}
    parts = [f"D={D} {str(dtype).removeprefix('torch.')} B={B} Tq={Tq} group={H // K}"]
    parts += [f"page={page}"] * bool(page) + ["starts"] * starts
    return Case(" ".join(parts), run, mma)
