"""An op described once, for all who prove, measure or choose it.

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

from .proof.compile import Case

Problem = Mapping[str, Any]
Work = dict[str, tuple[float, float]]
"""Pass ("fwd", "bwd", "both") -> (FLOPs of matrix products, bytes of memory, each element once)."""


class Make(Protocol):
    """Makes a tensor of random numbers, in the dtype and on the device of the caller's choice."""

    def __call__(self, *sizes: int, below: int = 0) -> Tensor:
        """Normal numbers (sizes), or with `below` int64 from 0 to below - 1."""
        ...


def no_options(problem: Problem, device: torch.device | str) -> dict[str, Any]:
    return {}


def whole(name: str, x: Tensor) -> Tensor:
    return x


def same(problem: Problem) -> Problem:
    return problem


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One public op.

    Called as `op(*inputs(...).values(), **options(...))`, and so are `ref` and `eager`.
    """

    name: str
    op: Callable[..., Any]
    """Ours, as the package exports it."""
    ref: Callable[..., Any]
    """The reference: the op's contract in plain PyTorch, and the truth when it runs in fp64."""
    eager: Callable[..., Any]
    """PyTorch's own ops for it, whose error is the measure of everybody's."""
    inputs: Callable[[Problem, Make], dict[str, Tensor]]
    """The tensors of a problem by argument name; floating ones get a gradient."""
    options: Callable[[Problem, torch.device | str], dict[str, Any]] = no_options
    """The other arguments; tensors among them (positions, a seed) get no gradient."""
    launches: Callable[[Problem], tuple[str, ...]]
    """Names of the kernels that forward and backward of a problem launch."""
    forms: Callable[[int], Iterator[Case]]
    """Every configuration that ships for an arch, to be compiled ahead of time."""
    work: Callable[[Problem, int], Work]
    """The least work of an op, given the bytes of an element; see `Work`."""
    problems: Mapping[str, Problem]
    """Small and awkward problems that reach every branch of the kernels; the first is typical."""
    sizes: Mapping[str, Mapping[str, Problem]]
    """Problems as they occur, by device ("cuda", "cpu") and label: what the bench measures, and on
    CUDA also proves. The first of a device is what a quick look takes."""
    structural: tuple[str, ...] = ()
    """Labels of the problems at which everything but errors is checked; () is the first one."""
    growing: tuple[Problem, ...] = ()
    """Changes of the first problem's sizes that must not compile anything anew: neither the
    first four in torch.compile, which takes a size of 0 or 1 for fixed, nor any the kernels."""
    empty: tuple[Problem, ...] = ()
    """Changes that make the first problem one without rows."""
    far: tuple[Problem, ...] = ()
    """Changes that give the first problem's tensors three rows, to lie 2**30 elements apart:
    the first dimension of size 3 that is not the last."""
    differentiable: bool = True
    cpu: Callable[..., Any] | None = None
    """The form that the model runs on a CPU in place of `op`, if another is faster there."""
    overwritten: str = ""
    """The input whose memory `op` takes for its gradient, if its option `inplace_grad` is set."""
    probe: Callable[[str, Tensor], Tensor] = whole
    """The part of an input, output or gradient that is checked where an fp64 reference of all of it
    would not fit; itself a whole problem. Called as probe("q" or "output 0", tensor)."""
    probed: Callable[[Problem], Problem] = same
    """The problem that `probe` makes of a problem."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Checks by name that it need not pass, each with the reason."""
    random: Callable[[dict[str, Tensor], Any], list[str]] | None = None
    """The exception from the tolerance rule, for ops that draw random numbers: what is wrong with
    an output for these inputs, in words."""

    def call(
        self, f: Callable[..., Any], problem: Problem, device: torch.device | str
    ) -> Callable[..., Any]:
        """`f`, one of op, ref, eager or cpu, with the options of a problem."""
        options = self.options(problem, device)

        def bound(*tensors: Tensor, **more: Any) -> Any:
            return f(*tensors, **options, **more)

        return bound


def rows(problem: Problem) -> tuple[int, ...]:
    """The leading sizes of a problem's `M`, which may be one number or several."""
    M = problem["M"]
    return (M,) if isinstance(M, int) else tuple(M)


def work(fwd: tuple[float, float], bwd: tuple[float, float]) -> Work:
    """(FLOPs, bytes) of forward, of backward, and of both as their sum."""
    return {"fwd": fwd, "bwd": bwd, "both": (fwd[0] + bwd[0], fwd[1] + bwd[1])}
