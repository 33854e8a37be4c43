"""What `rotary` is proved and measured by."""

from collections.abc import Iterator

import torch

from ..proof.compile import Case


def forms(arch: int) -> Iterator[Case]:
    """GPTs' head dimensions, both conventions, and in place."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for backward in (False, True):
        for D in (64, 128):
            yield form(12, 12, D, bf16, conjugate=backward)
        yield form(12, 12, 64, bf16, interleaved=True, conjugate=backward)
    yield form(12, 4, 64, bf16, inplace=True)
    yield form(12, 4, 80, torch.float16)
    yield form(8, 1, 256, fp32, interleaved=True)


def form(H: int, K: int, D: int, dtype: torch.dtype, **options: bool) -> Case:
    def run() -> None:
        from .device import rotary_turn

        qkv = torch.empty(4, 1024, H + 2 * K, D, dtype=dtype, device="meta")
        q, k, _ = qkv.split((H, K, K), dim=2)
        cos = torch.empty(1024, D // 2, device="meta")
        rotary_turn(q, k, cos, cos, **{"interleaved": False, **options})

    label = [f"H={H} K={K} D={D} {str(dtype).removeprefix('torch.')}"]
    label += [name for name, on in options.items() if on]
    return Case(" ".join(label), run)
