"""Describes an op once, for the tests, the benchmarks and the choice of `--ops.* auto`.

Each op's folder has a `spec` module with one `Spec` per public function; `kernels.specs` lists
them. The conformance tests, the tests on CUDA, the bench, the trial of `--ops.* auto` and the
ahead-of-time check read these and nothing else about an op.

A problem is a dict of sizes and choices, {"M": 7, "N": 123, "kind": "swiglu"}: `inputs` makes the
tensors of it and `options` the keyword arguments.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .parity import TERMS, faults
from .proof.compile import Variant

Problem = Mapping[str, Any]
Work = dict[str, tuple[float, float]]
"""FLOPs and bytes of each pass ("fwd", "bwd", "both"): (matmul FLOPs, bytes of memory)."""


class Make(Protocol):
    """Function that makes a random tensor, of a dtype and on a device that the caller chose."""

    def __call__(self, *sizes: int, below: int = 0) -> Tensor:
        """Draws normal numbers (sizes), or with `below` int64 from 0 to below - 1."""
        ...


def no_options(problem: Problem, device: torch.device | str) -> dict[str, Any]:
    return {}


def no_products(problem: Problem) -> dict[str, int]:
    return {}


def full_tensor(name: str, x: Tensor) -> Tensor:
    return x


def same(problem: Problem) -> Problem:
    return problem


def with_input_bias(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` with its argument input_bias as the last tensor, where a problem has one."""

    def call(*tensors: Tensor, input_bias: bool = False, **options: Any) -> Any:
        if not input_bias:
            return f(*tensors, **options)
        return f(*tensors[:-1], input_bias=tensors[-1], **options)

    return call


def few_terms(problem: Problem) -> int:
    return TERMS


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
    inputs: Callable[[Problem, Make], dict[str, Tensor]]
    """Function that makes the tensors of a test problem by argument name."""
    options: Callable[[Problem, torch.device | str], dict[str, Any]] = no_options
    """Function that makes the keyword arguments of a problem, which get no gradient."""
    launches: Callable[[Problem], tuple[str, ...]]
    """Function that names the kernels which forward and backward of a problem launch."""
    variants: Callable[[int], Iterator[Variant]]
    """Function that yields the kernel variants that ship for an architecture."""
    work: Callable[[Problem, int], Work]
    """Function that counts the op's minimal FLOPs and bytes, given the bytes of an element."""
    multiply_adds: Callable[[Problem], Mapping[str, int]] = no_products
    """Function that counts the fewest multiply-adds of tensor cores, by kernel."""
    problems: Mapping[str, Problem]
    """Small and awkward problems that reach every branch of the kernels; the first is typical."""
    sizes: Mapping[str, Mapping[str, Problem]]
    """Problems of realistic size, by device ("cuda", "cpu") and label, which the benchmark
    measures.

    On CUDA they are tested as well. The first of a device is the one that `--quick` measures.
    """
    structural: tuple[str, ...] = ()
    """Labels of the problems for all checks but the tolerance; () is the first one."""
    growing: tuple[Problem, ...] = ()
    """Changes of the first problem's sizes that must not cause a new compilation.

    The first four must not in torch.compile, which specialises on sizes 0 and 1; none may in
    Triton.
    """
    empty: tuple[Problem, ...] = ()
    """Changes that make the first problem's tensors empty."""
    far: tuple[Problem, ...] = ()
    """Changes that give the first problem's tensors three rows, to lie 2**30 elements apart.

    The rows are the first dimension of size 3 that is not the last.
    """
    terms: Callable[[Problem], int] = few_terms
    """Length of the longest sum that is added one term after the other: see `parity.complaints`."""
    differentiable: bool = True
    cpu: Callable[..., Any] | None = None
    """Function that the model calls on a CPU instead of `op`, if another is faster there."""
    overwritten: str = ""
    """Input that `op` overwrites with its gradient, if its option `inplace_grad` is set."""
    probe: Callable[[str, Tensor], Tensor] = full_tensor
    """Function that picks the part of a tensor to check, where checking all takes too much memory.

    The part is itself a whole problem. Called as probe("q" or "output 0", tensor).
    """
    probed: Callable[[Problem], Problem] = same
    """Function that gives the sizes of the part of a problem that `probe` picks."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Names of checks that the op need not pass, each with the reason."""
    random: Callable[[dict[str, Tensor], Any], list[str]] | None = None
    """Check that replaces the tolerance rule for ops that draw random numbers.

    It returns what is wrong with an output for these inputs, in words.
    """

    def call(
        self, f: Callable[..., Any], problem: Problem, device: torch.device | str
    ) -> Callable[..., Any]:
        """Returns `f` (op, ref, eager or cpu) with the keyword arguments of a problem filled in."""
        options = self.options(problem, device)

        def bound(*tensors: Tensor, **more: Any) -> Any:
            return f(*tensors, **options, **more)

        return bound

    def faults(self, device: torch.device | str, dtype: torch.dtype) -> list[str]:
        """Checks the first problem on a device by the rule of `parity`; returns what is wrong."""

        def make(*sizes: int, below: int = 0) -> Tensor:
            return (torch.randint(below, sizes) if below else torch.randn(sizes)).to(device)

        torch.manual_seed(0)
        problem = next(iter(self.problems.values()))
        ours = self.op if torch.device(device).type == "cuda" else self.cpu or self.op
        forms = [self.call(f, problem, device) for f in (ours, self.eager, self.ref)]
        inputs = self.inputs(problem, make)
        if self.random is not None:
            return self.random(inputs, forms[0](*inputs.values()))
        terms = self.terms(problem)
        return faults(forms, inputs, dtype, gradients=self.differentiable, terms=terms)


def rows(problem: Problem) -> tuple[int, ...]:
    """Returns the leading sizes of a problem's tensors, `M`, which may be one number or several."""
    M = problem["M"]
    return (M,) if isinstance(M, int) else tuple(M)


def work(fwd: tuple[float, float], bwd: tuple[float, float]) -> Work:
    """Adds up the (FLOPs, bytes) of forward and backward to those of both."""
    return {"fwd": fwd, "bwd": bwd, "both": (fwd[0] + bwd[0], fwd[1] + bwd[1])}
