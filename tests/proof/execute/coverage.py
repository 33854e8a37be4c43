"""Share of the shipped instructions that are executed: `python -m tests.proof.execute.coverage`.

Every variant that is compiled ahead of time (`Spec.variants`) is launched as it is described, but
with real tensors of fewer rows or tokens in place of meta tensors: the sizes are no part of the
code. An instruction is reached once it ran in a thread; one with a guard, once the guard was true.
Exits with 1 if less than 95 % of a variant are reached without an explanation.

    python -m tests.proof.execute.coverage --arch 90 --only rotary
"""

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from fastgpt.kernels import runtime
from fastgpt.kernels.attention.spec import SHAPES
from fastgpt.kernels.cross_entropy.spec import EVERY_OPTION, variants_of
from fastgpt.kernels.proof.compile import Variant, collect
from fastgpt.kernels.proof.fenced import compile_launch, run_launch
from fastgpt.kernels.specs import SPECS
from simgpu.executor import Launch
from simgpu.executor.launch import built

ENOUGH = 0.95
SIZES: dict[str, tuple[dict[int, int], ...]] = {
    "attention": ({16: 1, 1024: 330},),
    "decode_attention": ({64: 1, 4096: 530, 1024: 140, 256: 35}, {64: 22, 4096: 250}),
    "cross_entropy": ({4096: 9},),
    "layer_norm": ({4096: 70},),
    "bias_act": ({4096: 70},),
    "rotary": ({4: 1, 1024: 37},),
}
"""Op -> what takes the place of a leading size of its variants' tensors, in turn."""
MULTIPROCESSORS = {"decode_attention": 132}
"""Op -> multiprocessors of the device, which decide the splits; others have 1, for long loops."""

HEADS = {D: (B, T, 16 if H % 16 == 0 else 4) for D, (B, T, H) in SHAPES.items()}
"""Sizes of attention with fewer heads; a multiple of 16 stays one, which Triton specialises."""
EXPLAINED = {
    "_cross_entropy_scale_kernel": "its loop over rows for V = 0, when nothing is launched",
    # the last two have tiles of as many queries as keys, so that the diagonal crosses just one
    "_attention_.* full|_bwd_dq_kernel D=(32|64) bfloat16 causal|_attention_fwd_kernel D=80": "the "
    "masked loop runs once at most, and as a pipeline it has code for more",
    "_attention_bwd_dkv_kernel": "zeros to store without any query, when nothing is launched",
}
"""Pattern of variants -> why less than enough is reached."""


@dataclass(slots=True)
class Reached:
    """Instructions of a compiled variant, and those that have run."""

    key: str
    sources: dict[int, str] = field(default_factory=dict)
    """Line of PTX -> source line, of each instruction."""
    lines: set[int] = field(default_factory=set)

    def watch(self, ptx: str) -> None:
        """Notes what runs from now on until the steps of the program are made anew."""
        build = built(ptx)
        for steps, block in zip(build.blocks, build.program.blocks):
            for i, instruction in enumerate(block):
                self.sources[instruction.line] = instruction.source
                steps[i] = self.noting(steps[i], instruction)

    def noting(self, step: Callable[..., None], instruction: Any) -> Callable[..., None]:
        guard, negated = instruction.guard, instruction.negated
        always = guard is None or instruction.op.startswith("bra")

        def run(machine: Any, mask: Any) -> None:
            if always or machine.active(mask, guard, negated)[0]:
                self.lines.add(instruction.line)
            step(machine, mask)

        return run

    @property
    def share(self) -> float:
        return len(self.lines) / len(self.sources)

    def missed(self) -> str:
        """Returns the source lines of what was not reached, with the number of instructions."""
        missed = Counter(source for line, source in self.sources.items() if line not in self.lines)
        return ", ".join(f"{line} ({count})" for line, count in missed.items())


def small(sizes: dict[int, int]) -> Callable[..., torch.Tensor]:
    """Returns a `torch.empty` whose meta tensors become real ones with smaller leading sizes."""
    empty = torch.empty

    def make(*size: Any, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
        if device != "meta":
            return empty(*size, device=device, dtype=dtype, **options)
        shape = list(size if not size or isinstance(size[0], int) else size[0])
        dtype = dtype or torch.float32
        # rows of a matrix, batch and tokens of more: a vector belongs to columns
        leading = max(len(shape) - 2, len(shape) > 1) if dtype.is_floating_point else len(shape)
        shape[:leading] = [sizes.get(n, n) for n in shape[:leading]]
        if dtype.is_floating_point:
            return torch.randn(shape).to(dtype).requires_grad_(options.get("requires_grad", False))
        if dtype == torch.int32:  # documents, pages
            return (torch.arange(shape[-1], dtype=dtype) // 300).expand(shape).contiguous()
        # lengths and targets, some of them impossible; first positions
        last = 600 if len(shape) == 1 else 20
        found = torch.randint(last, shape)
        found.view(-1)[1:2] = -100
        return found

    return make


def variants(name: str, arch: int) -> Iterator[Variant]:
    """Yields an op's variants; some also with other sizes, which are no part of the code."""
    yield from SPECS[name].variants(arch)
    if name == "cross_entropy":  # columns left over after whole blocks
        for V, dtype in itertools.product((240, 2032), (torch.bfloat16, torch.float32)):
            yield from variants_of(V, dtype, **EVERY_OPTION)


def coverage(name: str, arch: int) -> Iterator[Reached]:
    """Executes the variants of an op; yields what of each was reached."""
    torch.manual_seed(0)
    configs = list(collect([SPECS[name].variants], [arch]))
    reached = {compile_launch(config.launch, arch).ptx: Reached(config.key) for config in configs}
    watched: set[str] = set()

    def run(launch: Launch) -> None:
        kernel = compile_launch(launch, arch)
        if kernel.ptx in reached and kernel.ptx not in watched:
            watched.add(kernel.ptx)
            reached[kernel.ptx].watch(kernel.ptx)
        run_launch(kernel, launch)

    for number in range(len(list(variants(name, arch)))):
        built.cache_clear()  # the steps of a program take megabytes
        watched.clear()
        for sizes in SIZES[name]:
            with (
                mock.patch.object(torch, "empty", small(sizes)),
                mock.patch.object(torch, "empty_like", torch.ones_like),  # gradients that flow in
                mock.patch.dict(SHAPES, HEADS),
                runtime.executing(arch, run, MULTIPROCESSORS.get(name, 1)),
            ):
                next(itertools.islice(variants(name, arch), number, None)).run()
    yield from reached.values()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--only", choices=SIZES, help="only this op")
    given = parser.parse_args()
    low = 0
    for name in [given.only] if given.only else SIZES:
        for reached in coverage(name, given.arch):
            print(f"{reached.share:6.1%} of {len(reached.sources)} {reached.key}", flush=True)
            whys = [why for variant, why in EXPLAINED.items() if re.search(variant, reached.key)]
            why = whys[0] if whys and reached.share < ENOUGH else ""
            low += reached.share < ENOUGH and not why
            if missed := reached.missed():
                print(f"       not: {missed}{why and f': {why}'}")
    print(f"sm_{given.arch}: {low} variants below {ENOUGH:.0%}")
    return low > 0


if __name__ == "__main__":
    sys.exit(main())
