"""The smallest kernel that shows the fence Triton leaves out, as compiled and with it added.

    python -m tests.proof.execute.missing_fence

What is wrong with it is in docs/reports/triton-sm100-fence.md.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from fastgpt.kernels.fences import add_fences
from fastgpt.kernels.proof.fenced import compile_launch, executor, run_launch

SIZE, TILES = 64, 5


@triton.jit
def two_products(x_ptr, y_ptr, out_ptr, tiles, SIZE: tl.constexpr):
    """Computes the sum of x y_t y_t over t, where each tile y_t is copied by cp.async."""
    i = tl.arange(0, SIZE)
    tile = i[:, None] * SIZE + i[None, :]
    x = tl.load(x_ptr + tile)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for t in range(tiles):
        y = tl.load(y_ptr + t * SIZE * SIZE + tile)
        total = tl.dot(tl.dot(x, y).to(y.dtype), y, total)
    tl.store(out_ptr + tile, total)


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(SIZE, SIZE).bfloat16(), torch.randn(TILES, SIZE, SIZE).bfloat16() / 8
    expected = ((x.float() @ y.float()).bfloat16().float() @ y.float()).sum(0)
    for arch in (80, 90, 100, 110):
        out = torch.empty(SIZE, SIZE)
        meta = {"SIZE": SIZE, "num_warps": 4, "num_stages": 2}
        launch = executor.Launch(two_products, (x, y, out, TILES), meta, (1,))
        compiled = compile_launch(launch, arch)
        for name, ptx in (("as compiled", compiled.ptx), ("with fences", add_fences(compiled.ptx))):
            try:
                run_launch(replace(compiled, ptx=ptx), launch)
                said = str(torch.allclose(out, expected, atol=1e-2, rtol=1e-2))
            except executor.FaultError as fault:
                said = str(fault)
            print(f"Triton {triton.__version__}, sm_{arch}, {name}: {said}")


if __name__ == "__main__":
    main()
