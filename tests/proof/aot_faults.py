"""Kernels with one fault each, and one without, for test_aot.py."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgpt.kernels.proof.compile import Variant
from fastgpt.kernels.runtime import launch


@triton.jit
def _square_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.dot(x, x))


@triton.jit
def _spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))  # all of it is needed until the sum is known
    tl.store(y_ptr + tl.arange(0, BLOCK), x / tl.sum(x))


@triton.jit
def _streaming_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(0, n, num_stages=STAGES):
        total += tl.load(x_ptr + i * BLOCK + offs)
    tl.store(y_ptr + offs, total)


@triton.jit
def _missing_kernel(x_ptr):
    tl.store(x_ptr, no_such_name)  # noqa: F821


def variants(arch: int) -> Iterator[Variant]:
    def square(block: int) -> None:
        x = torch.empty(block, block, dtype=torch.float16, device="meta")
        y = torch.empty(block, block, device="meta")
        launch(_square_kernel, (1,), x, y, BLOCK=block, num_warps=4, num_stages=2)

    def spill() -> None:
        x = torch.empty(2**14, device="meta")
        launch(_spilling_kernel, (1,), x, x, BLOCK=2**14, num_warps=1)

    def stream(stages: int) -> None:
        x = torch.empty(2**13, device="meta")
        launch(_streaming_kernel, (1,), x, x, 100, BLOCK=2**13, STAGES=stages, num_warps=8)

    mma = {"_square_kernel": {80: "HMMA", 90: "HGMMA", 100: "UTC"}[arch]}
    yield Variant("sound", lambda: square(64), mma)
    yield Variant("sound again", lambda: square(64), mma)
    yield Variant("small for its instruction", lambda: square(16), mma)
    yield Variant("too much shared memory", lambda: stream(9))
    yield Variant("spill", spill)
    yield Variant("broken", lambda: launch(_missing_kernel, (1,), torch.empty(1, device="meta")))
