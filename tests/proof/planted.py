"""A kernel with one flaw of each kind that a comparison must name, for test_rules.py.

python -m tests.proof.planted FOLDER    # writes FOLDER/<flaw>.json for each
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend

from fastgpt.kernels.proof.compile import Variant
from fastgpt.kernels.proof.report import configs_of, report
from fastgpt.kernels.runtime import launch
from fastgpt.kernels.spec import Make, Problem, Spec

SIZE = 64
PTX = {"fence": r"fence\.proxy\.async[\w.:]*;", "race": r"bar\.sync\s+0;"}
"""Flaw -> what is deleted from the compiled code."""
META: dict[str, dict[str, int]] = {
    "registers": {"num_warps": 1},
    "shared": {"num_stages": 4},
    "ceiling": {"num_warps": 16},
}
"""Flaw -> settings of the launch."""
FLAWS = ("none", "tolerance", "order", "compile", "bounds", *PTX, *META)
flaw = "none"


@triton.jit
def _planted_kernel(x_ptr, y_ptr, tiles, FLAW: tl.constexpr, SIZE: tl.constexpr):
    """Computes the sum of x_t x_t over t, where each tile x_t is copied by cp.async."""
    tl.static_assert(FLAW != "compile", "planted")
    i = tl.arange(0, SIZE)
    tile = i[:, None] * SIZE + i[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for t in tl.range(0, tiles + (FLAW == "bounds")):
        at = tiles - 1 - t if FLAW == "order" else t
        x = tl.load(x_ptr + at * SIZE * SIZE + tile)
        total = tl.dot(x, x, total)
    tl.store(y_ptr + tile, total * 1.1 if FLAW == "tolerance" else total)


def op(x: Tensor) -> Tensor:
    y = torch.empty(SIZE, SIZE, device=x.device)
    constants = {"FLAW": flaw if flaw not in META else "none", "SIZE": SIZE}
    meta = {"num_warps": 4, "num_stages": 2, **META.get(flaw, {})}
    launch(_planted_kernel, (1,), x, y, x.shape[0], **constants, **meta)
    return y


def ref(x: Tensor) -> Tensor:
    return (x @ x).sum(0)


def inputs(problem: Problem, make: Make) -> dict[str, Tensor]:
    return {"x": make(problem["M"], SIZE, SIZE)}


def variants(arch: int) -> Iterator[Variant]:
    x = torch.empty(5, SIZE, SIZE, dtype=torch.bfloat16, device="meta")
    yield Variant("bf16", lambda: op(x))  # type: ignore[arg-type]


SPECS = [
    Spec(
        name="planted", op=op, ref=ref, eager=ref, inputs=inputs, variants=variants,
        launches=lambda s: ("_planted_kernel",), work=lambda s, n: {},
        problems={"five": {"M": 5}}, sizes={},
    )
]  # fmt: skip


def without(pattern: str) -> AbstractContextManager[Any]:
    """Patches the compiler: it leaves out of the PTX what the pattern finds."""
    to_ptx = CUDABackend.make_ptx

    def make_ptx(self: Any, *args: Any) -> str:
        return re.sub(pattern, "", to_ptx(self, *args))

    return mock.patch.object(CUDABackend, "make_ptx", make_ptx)


def main() -> None:
    global flaw
    folder = Path(sys.argv[1])
    for flaw in FLAWS:
        os.environ["TRITON_CACHE_DIR"] = str(folder / flaw)
        with without(PTX[flaw]) if flaw in PTX else nullcontext():
            configs = configs_of([90], variants=[variants])
            found = report(configs, SPECS, [90], dtypes=["bf16"])
        (folder / f"{flaw}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
