"""What a case is: an op, who implements it, at a shape, in a dtype."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.peers import Maker
from bench.shapes import Shape, Shapes
from bench.work import Work
from fastgpt.device import DTYPES

Inputs = dict[str, Tensor]
Make = Callable[..., Tensor]


def whole(name: str, x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op and all who implement it."""

    name: str
    inputs: Callable[[Shape, Make], Inputs]
    """From a shape and a function that draws random numbers: (*sizes) -> the op's arguments."""
    ref: Callable[..., Any]
    """The truth, when run in a wider dtype."""
    implementations: dict[str, Maker]
    """`ours`, `eager` (PyTorch's own, whose error is the measure of all others'), and peers."""
    work: Callable[[Shape, int], Work]
    """{pass: (FLOPs, bytes)} of a shape, with so many bytes an element."""
    shapes: Shapes
    """By `cuda`, `cpu` and `tiny`, which is for rehearsals; by label."""
    full: Shapes = field(default_factory=dict)
    """The same for `--full`: what takes long. On a CPU their memory is measured, too."""
    passes: tuple[str, ...] = ("fwd", "bwd", "both")
    probe: Callable[[str, Tensor], Tensor] = whole
    """The part of an input, output or gradient that is checked, itself a whole problem."""
    overwritten: str = ""
    """The input that an implementation may write over: it is restored before each call."""
    check: Callable[[Inputs, Tensor], list[str]] | None = None
    """In place of the tolerance rule, for what is random."""


@dataclass(frozen=True, slots=True)
class Case:
    """An op at a shape, in a dtype."""

    op: Op
    label: str
    shape: Shape
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.op.name}/{self.label}/{self.dtype}"

    @property
    def differentiable(self) -> bool:
        return "bwd" in self.op.passes

    def inputs(self, on: str) -> Inputs:
        """Random, never zeros: what data costs in power shows in the clocks."""
        generator = torch.Generator(on).manual_seed(0)
        dtype = DTYPES[self.dtype]

        def make(*sizes: int, below: int = 0) -> Tensor:
            if below:
                return torch.randint(below, sizes, device=on, generator=generator)
            drawn = torch.randn(sizes, device=on, generator=generator)
            return drawn.to(dtype).requires_grad_(self.differentiable)

        return self.op.inputs(self.shape, make)

    def work(self) -> Work:
        return self.op.work(self.shape, DTYPES[self.dtype].itemsize)
