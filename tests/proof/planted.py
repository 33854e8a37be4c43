"""Kernels with one fault each, which the rules and a comparison must name.

python -m tests.proof.planted FOLDER    # writes FOLDER/<flaw>.json for each flaw, and found.json
"""

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend

from fastgpt.kernels import aot, fences
from fastgpt.kernels.proof.compile import Variant, compile_all, fingerprint
from fastgpt.kernels.proof.report import configs_of, report, unknown
from fastgpt.kernels.runtime import launch
from fastgpt.kernels.spec import Make, Problem, Spec, meta

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


def product(x: Tensor, flaw: str = "none", stages: int = 2) -> Tensor:
    size = x.shape[-1]
    y = torch.empty(size, size, device=x.device)
    constants = {"FLAW": flaw if flaw not in META else "none", "SIZE": size}
    settings = {"num_warps": 4, "num_stages": stages, **META.get(flaw, {})}
    launch(_planted_kernel, (1,), x, y, x.shape[0], **constants, **settings)
    return y


def tiles(size: int = SIZE) -> Tensor:
    return meta(5, size, size, dtype=torch.bfloat16)


def faulty(arch: int) -> Iterator[Variant]:
    mma, wide = {"_planted_kernel": "HGMMA"}, meta(2**14)
    yield Variant("sound", lambda: product(tiles(), stages=3), mma)
    yield Variant("sound again", lambda: product(tiles(), stages=3), mma)
    yield Variant("two stages", lambda: product(tiles()), mma)
    yield Variant("small for its instruction", lambda: product(tiles(16)), mma)
    yield Variant("broken", lambda: product(tiles(), "compile"), mma)
    settings = {"BLOCK": 2**13, "STAGES": 9, "num_warps": 8}
    yield Variant(
        "too much shared memory", lambda: launch(_streaming_kernel, (1,), wide, wide, 9, **settings)
    )
    spill = {"BLOCK": 2**14, "num_warps": 1}
    yield Variant("spill", lambda: launch(_spilling_kernel, (1,), wide, wide, **spill))


def checked() -> dict[str, Any]:
    """Returns what the check of faulty kernels prints and counts, and their compiled rows."""
    configs = configs_of([90], variants=[faulty])
    with redirect_stdout(StringIO()) as printed:
        wrong = aot.check(configs)
    rows = {row.config: asdict(row) for row in compile_all(configs)}
    return {"wrong": wrong, "printed": printed.getvalue(), "rows": rows}


def differing(folder: Path) -> dict[str, list[str]]:
    """Returns which configurations of a folder's modules differ from `nothing.py`."""
    sys.path.insert(0, str(folder))

    def configs(name: str) -> list[Any]:
        return configs_of([90], variants=[importlib.import_module(name).variants])

    found = {}
    with mock.patch.object(fences, "needs_fence", return_value=True):
        known = [fingerprint(config) for config in configs("nothing")]
        for name in sorted(path.stem for path in folder.glob("*.py")):
            with mock.patch.object(fences, "KEY", "another" if name == "fences" else fences.KEY):
                new = unknown(configs(name), known)
            found[name] = sorted(config.key.removeprefix("sm_90 ") for config in new)
    return found


def ref(x: Tensor) -> Tensor:
    return (x @ x).sum(0)


def inputs(problem: Problem, make: Make) -> dict[str, Tensor]:
    return {"x": make(problem["M"], SIZE, SIZE)}


def variants(arch: int) -> Iterator[Variant]:
    yield Variant("bf16", lambda: product(tiles(), flaw))


SPECS = [
    Spec(
        name="planted", op=lambda x: product(x, flaw), ref=ref, eager=ref, inputs=inputs,
        variants=variants, launches=lambda s: ("_planted_kernel",), work=lambda s, n: {},
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
    found = {**checked(), "differing": differing(folder)}
    (folder / "found.json").write_text(json.dumps(found))
    for flaw in FLAWS:
        os.environ["TRITON_CACHE_DIR"] = str(folder / flaw)
        with without(PTX[flaw]) if flaw in PTX else nullcontext():
            configs = configs_of([90], variants=[variants])
            compared = report(configs, SPECS, [90], dtypes=["bf16"])
        (folder / f"{flaw}.json").write_text(json.dumps(compared))


if __name__ == "__main__":
    main()
