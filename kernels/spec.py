"""Describes an op once, for the tests, the benchmarks and the choice of `--ops.* auto`.

Each op's folder has a `spec` module with one `Spec` per public function; `kernels.specs` lists
them. The conformance tests, the tests on CUDA, the bench, the trial of `--ops.* auto` and the
ahead-of-time check read these and nothing else about an op.

A problem is a dict of sizes and choices, {"M": 7, "N": 123, "kind": "swiglu"}: `inputs` makes the
tensors of it and `options` the keyword arguments. A `STRUCTURAL` one is for all checks, another for
that of the tolerance alone; where an op has none, its first problem is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .parity import TERMS, faults
from .proof.compile import Variant

Problem = Mapping[str, Any]
STRUCTURAL: Problem = {"structural": True}
Work = dict[str, tuple[float, float]]
"""FLOPs and bytes of each pass ("fwd", "bwd", "both"): (matmul FLOPs, bytes of memory)."""


class Make(Protocol):
    """Function that makes a random tensor, of a dtype and on a device that the caller chose."""

    def __call__(self, *sizes: int, below: int = 0) -> Tensor:
        """Draws normal numbers (sizes), or with `below` int64 from 0 to below - 1."""
        ...


def short(dtype: torch.dtype | None) -> str:
    """Returns the name of a dtype in labels."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", None: "none"}
    return names[dtype]


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor without memory, with which a variant is launched."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def step(op: Callable[..., Any], *inputs: Tensor | None, **options: Any) -> None:
    """Calls an op and its backward for all gradients."""
    leaves = [None if x is None else x.requires_grad_() for x in inputs]
    found = op(*leaves, **options)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    wanted = [x for x in leaves if x is not None]
    torch.autograd.grad(outputs, wanted, [torch.empty_like(y) for y in outputs])


def no_options(problem: Problem, device: torch.device | str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Sizes that replace some of a problem's; by default those of an op on rows, `M` of them."""

    growing: tuple[Problem, ...] = tuple(
        {"M": M} for M in ((2, 5), (3, 5), (4, 8), (5, 9), 1, 15, 16, 17, 4096, 65_537)
    )
    """Sizes that must not cause a new compilation: the first four not in torch.compile, which
    specialises on sizes 0 and 1; none in Triton."""
    empty: tuple[Problem, ...] = ({"M": 0}, {"M": (3, 0)})
    """Sizes of empty tensors."""
    far: tuple[Problem, ...] = ({"M": 3},)
    """Sizes of tensors with three rows, to lie 2**30 elements apart. The rows are the first
    dimension of size 3 that is not the last."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Description of one public op.

    The op is called as `op(*inputs(...).values(), **options(...))`, and so are `ref` and `eager`.
    """

    name: str
    op: Callable[..., Any]
    """The op as the package exports it."""
    ref: Callable[..., Any]
    """Reference: the op in plain PyTorch, and the truth when it runs in fp64."""
    eager: Callable[..., Any]
    """PyTorch's own ops for the same computation, whose error sets the tolerance."""
    cpu: Callable[..., Any] | None = None
    """Function that the model calls on a CPU instead of `op`, if another is faster there."""
    inputs: Callable[[Problem, Make], dict[str, Tensor]]
    """Function that makes the tensors of a test problem by argument name."""
    options: Callable[[Problem, torch.device | str], dict[str, Any]] = no_options
    """Function that makes the keyword arguments of a problem, which get no gradient."""
    launches: Callable[[Problem], tuple[str, ...]]
    """Function that names the kernels which forward and backward of a problem launch."""
    variants: Callable[[int], Iterator[Variant]]
    """Function that yields the kernel variants that ship for an architecture."""
    work: Callable[[Problem, int], Work]
    """Function that counts the op's minimal FLOPs and bytes, given the bytes of an element.

    Without a backward pass in it the op has no gradient.
    """
    problems: Mapping[str, Problem]
    """Small and awkward problems that reach every branch of the kernels; the first is typical."""
    sizes: Mapping[str, Mapping[str, Problem]]
    """Problems of realistic size, by device ("cuda", "cpu") and label, which the benchmark
    measures.

    On CUDA they are tested as well. The first of a device is the one that `--quick` measures.
    """
    changes: Changes = Changes()
    terms: Callable[[Problem], int] = lambda problem: TERMS
    """Length of the longest sum that is added one term after the other: see `parity.complaints`."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Names of checks that the op need not pass, each with the reason."""
    random: Callable[[dict[str, Tensor], Any], list[str]] | None = None
    """Check that replaces the tolerance rule for ops that draw random numbers.

    It returns what is wrong with an output for these inputs, in words.
    """

    @property
    def first(self) -> Problem:
        """The typical problem."""
        return next(iter(self.problems.values()))

    @property
    def structural(self) -> list[str]:
        """Labels of the problems for all checks."""
        return [x for x, s in self.problems.items() if "structural" in s] or [*self.problems][:1]

    @property
    def differentiable(self) -> bool:
        return "bwd" in self.work(self.first, 1)

    def call(
        self, f: Callable[..., Any], problem: Problem, device: torch.device | str
    ) -> Callable[..., Any]:
        """Returns `f` (op, ref, eager or cpu) with the keyword arguments of a problem filled in."""
        options = self.options(problem, device)
        return lambda *tensors, **more: f(*tensors, **options, **more)

    def faults(self, device: torch.device | str, dtype: torch.dtype) -> list[str]:
        """Checks the first problem on a device by the rule of `parity`; returns what is wrong."""

        def make(*sizes: int, below: int = 0) -> Tensor:
            return (torch.randint(below, sizes) if below else torch.randn(sizes)).to(device)

        torch.manual_seed(0)
        ours = self.op if torch.device(device).type == "cuda" else self.cpu or self.op
        forms = [self.call(f, self.first, device) for f in (ours, self.eager, self.ref)]
        inputs = self.inputs(self.first, make)
        if self.random is not None:
            return self.random(inputs, forms[0](*inputs.values()))
        terms = self.terms(self.first)
        return faults(forms, inputs, dtype, gradients=self.differentiable, terms=terms)


def rows(problem: Problem) -> tuple[int, ...]:
    """Returns the leading sizes of a problem's tensors, `M`, which may be one number or several."""
    M = problem["M"]
    return (M,) if isinstance(M, int) else tuple(M)


def work(fwd: tuple[float, float], bwd: tuple[float, float]) -> Work:
    """Adds up the (FLOPs, bytes) of forward and backward to those of both."""
    return {"fwd": fwd, "bwd": bwd, "both": (fwd[0] + bwd[0], fwd[1] + bwd[1])}
