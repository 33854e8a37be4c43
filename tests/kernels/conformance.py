"""What every op must do, as functions of its `Spec`: `test_conformance` runs them over all specs.

On a CPU the kernels run in Triton's interpreter, on CUDA as they are compiled. A check takes
(spec, problem, device) and raises AssertionError.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import runtime
from fastgpt.kernels.spec import Problem, Spec
from tests.parity import (
    LAYOUTS,
    assert_compiles_once,
    assert_parity,
    awkward,
    backward_only,
    forward_backward,
    guarded,
    launches,
)

Check = Callable[[Spec, Problem, str], None]


def make_inputs(
    spec: Spec, problem: Problem, device: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A problem's tensors, each row between NaN that no kernel may read."""

    def make(*sizes: int, below: int = 0) -> Tensor:
        if below:
            return torch.randint(below, sizes).to(device)
        return awkward(*sizes, dtype=dtype, device=device)

    return spec.inputs(problem, make)


def plain(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Contiguous copies."""
    return [x.clone(memory_format=torch.contiguous_format) for x in inputs.values()]


def run(spec: Spec, op: Callable[..., Any], tensors: Any, upstream: Any = None) -> list[Tensor]:
    """Outputs, and gradients where there are any."""
    if spec.differentiable:
        return forward_backward(op, tensors, upstream)
    with torch.no_grad():
        outputs = op(*tensors)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    """The same bits in the same layout; NaN is NaN."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()


# --- errors ---------------------------------------------------------------------------------------


def parity(spec: Spec, problem: Problem, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Outputs and gradients keep the rule of errors, and no row around a buffer is touched."""
    inputs = make_inputs(spec, problem, device, dtype)
    op, ref, eager = (spec.call(f, problem, device) for f in (spec.op, spec.ref, spec.eager))
    with launches(*spec.launches(problem)), guarded():
        assert_parity(op, ref, inputs, eager=eager, gradients=spec.differentiable)


def errors_are_seen(spec: Spec, problem: Problem, device: str) -> None:
    """An error of 1 %, or another sign, in one output or gradient breaks the rule there alone."""
    inputs = make_inputs(spec, problem, device)
    op, ref = spec.call(spec.op, problem, device), spec.call(spec.ref, problem, device)
    outputs = op(*inputs.values())
    count = 1 if isinstance(outputs, Tensor) else len(outputs)

    def of_output(i: int, factor: float) -> Callable[..., tuple[Tensor, ...]]:
        def mutated(*args: Tensor) -> tuple[Tensor, ...]:
            ys = op(*args)
            ys = list((ys,) if isinstance(ys, Tensor) else ys)
            ys[i] = ys[i] + (factor - 1) * ys[i].detach()
            return tuple(ys)

        return mutated

    def of_gradient(i: int, factor: float) -> Callable[..., Any]:
        return lambda *args: op(*args[:i], backward_only(args[i], factor), *args[i + 1 :])

    for factor in (1.01, -1.0):
        mutants = {f"output {i}": of_output(i, factor) for i in range(count)}
        for i, (name, x) in enumerate(inputs.items()):
            if spec.differentiable and x.is_floating_point():
                mutants[f"gradient of {name}"] = of_gradient(i, factor)
        for name, mutated in mutants.items():
            with pytest.raises(AssertionError, match=name) as caught:
                assert_parity(mutated, ref, inputs, gradients=spec.differentiable)
            said = str(caught.value).splitlines()
            assert [line for line in said if not line.startswith(name)] == [], name


# --- memory ---------------------------------------------------------------------------------------


def far_apart(x: Tensor, dim: int) -> Tensor:
    """x with 2**30 elements and more between its slices: few pages of memory are used."""
    x = x.movedim(dim, 0)
    stride = (1 << 30) + 8
    memory = torch.empty((len(x) - 1) * stride + x[0].numel(), dtype=x.dtype, device=x.device)
    inner = x[0].clone(memory_format=torch.contiguous_format).stride()
    return memory.as_strided(x.shape, (stride, *inner)).copy_(x).movedim(0, dim)


def strides_do_not_matter(spec: Spec, problem: Problem, device: str) -> None:
    """Any layout of any input gives the bits of a contiguous one."""
    inputs = make_inputs(spec, problem, device)
    op, contiguous = spec.call(spec.op, problem, device), plain(inputs)
    want = run(spec, op, contiguous)
    for name, layout in LAYOUTS.items():
        for i, x in enumerate(contiguous):
            if x.dim() < 3 or (spec.overwritten and name != "odd-offset"):
                continue
            moved = layout(x)
            same = [*contiguous[:i], moved.clone(memory_format=torch.contiguous_format)]
            same += contiguous[i + 1 :]
            with launches(*spec.launches(problem)), guarded():
                got = run(spec, op, [*contiguous[:i], moved, *contiguous[i + 1 :]])
            assert_same(got, want if torch.equal(moved, x) else run(spec, op, same))
    vectors = [x.repeat_interleave(2)[::2] if x.dim() == 1 else x for x in contiguous]
    assert_same(run(spec, op, vectors), want)


def strides_of_gradients_do_not_matter(spec: Spec, problem: Problem, device: str) -> None:
    inputs = make_inputs(spec, problem, device)
    op, contiguous = spec.call(spec.op, problem, device), plain(inputs)
    ys = op(*contiguous)
    ys = (ys,) if isinstance(ys, Tensor) else ys
    upstream = [awkward(*y.shape, device=device).to(y.dtype) for y in ys]
    for layout in (*LAYOUTS.values(), lambda dy: dy.flatten()[0].expand(dy.shape)):
        moved = [layout(dy) if dy.dim() > 2 else dy for dy in upstream]
        copies = [dy.clone(memory_format=torch.contiguous_format) for dy in moved]
        with guarded():
            got = run(spec, op, contiguous, moved)
        assert_same(got, run(spec, op, contiguous, copies))


def offsets_may_pass_32_bits(spec: Spec, problem: Problem, device: str) -> None:
    inputs = make_inputs(spec, problem, device, torch.float16)
    op, contiguous = spec.call(spec.op, problem, device), plain(inputs)
    want = run(spec, op, contiguous)
    for dim in range(max(x.dim() for x in contiguous) - 1):
        moves = [dim < x.dim() - 1 and 2 < x.shape[dim] < 8 for x in contiguous]
        if any(moves):
            far = (far_apart(x, dim) if moved else x for x, moved in zip(contiguous, moves))
            assert_same(run(spec, op, far), want)


def no_rows(spec: Spec, problem: Problem, device: str) -> None:
    """Empty outputs, gradients of 0, and nothing launched."""
    for change in spec.empty:
        inputs = make_inputs(spec, {**problem, **change}, device)
        op, ref = (spec.call(f, {**problem, **change}, device) for f in (spec.op, spec.ref))
        with launches(), guarded():
            got = run(spec, op, inputs.values())
        for a, b in zip(got, run(spec, ref, inputs.values()), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b, equal_nan=True)


def same_input_same_bits(spec: Spec, problem: Problem, device: str) -> None:
    inputs = make_inputs(spec, problem, device)
    op = spec.call(spec.op, problem, device)
    first = run(spec, op, inputs.values())
    for _ in range(2 if device == "cpu" else 1000):
        assert_same(run(spec, op, inputs.values()), first)


# --- autograd -------------------------------------------------------------------------------------


def gradients_of_some_inputs(spec: Spec, problem: Problem, device: str) -> None:
    """Asked for one gradient alone, it is that of all of them."""
    inputs = make_inputs(spec, problem, device)
    op = spec.call(spec.op, problem, device)
    floating = [name for name, x in inputs.items() if x.is_floating_point()]

    def gradients(wanted: list[str]) -> list[Tensor]:
        leaves = {k: x.clone().requires_grad_(k in wanted) for k, x in inputs.items()}
        ys = op(*leaves.values())
        total = sum(y.square().sum() for y in ((ys,) if isinstance(ys, Tensor) else ys))
        return list(torch.autograd.grad(total, [leaves[name] for name in wanted]))

    every = gradients(floating)
    for name, want in zip(floating, every, strict=True):
        torch.testing.assert_close(gradients([name]), [want], rtol=1e-5, atol=1e-6)


def a_second_derivative_raises(spec: Spec, problem: Problem, device: str) -> None:
    leaves = [
        x.requires_grad_(x.is_floating_point()) for x in plain(make_inputs(spec, problem, device))
    ]
    ys = spec.call(spec.op, problem, device)(*leaves)
    y = ys if isinstance(ys, Tensor) else ys[0]
    (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|no double backward"):
        dx.sum().backward()


def checkpointing_changes_nothing(spec: Spec, problem: Problem, device: str) -> None:
    inputs = plain(make_inputs(spec, problem, device))
    op = spec.call(spec.op, problem, device)
    recomputed = run(spec, lambda *x: checkpoint(op, *x, use_reentrant=False), inputs)
    assert_same(recomputed, run(spec, op, inputs))


def autocast_sets_the_dtype_of_outputs_alone(spec: Spec, problem: Problem, device: str) -> None:
    inputs = make_inputs(spec, problem, device)
    op, ref = (spec.call(f, problem, device) for f in (spec.op, spec.ref))
    count = len(run(spec, op, inputs.values())) - sum(
        x.is_floating_point() for x in inputs.values()
    )
    with torch.autocast(device, torch.bfloat16):
        with launches(*spec.launches(problem)):
            got = run(spec, op, inputs.values())
        want = run(spec, ref, inputs.values())
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype or i >= count
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    if spec.differentiable:
        assert all(dx.dtype == torch.float32 for dx in got[count:])


# --- torch.compile and torch.library --------------------------------------------------------------


class _Calls(TorchDispatchMode):
    """Notes what is called of torch's ops that are ours, with detached arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == runtime.NAMESPACE:
            self.seen.setdefault(func, tree_map_only(Tensor, Tensor.detach, args))
        return func(*args, **(kwargs or {}))


def opcheck_passes(spec: Spec, problem: Problem, device: str) -> None:
    """For each op that torch knows ours by, forward and backward, on arguments of a real call."""
    inputs = plain(make_inputs(spec, problem, device))
    with _Calls() as calls:
        run(spec, spec.call(spec.op, problem, device), inputs)
    assert calls.seen
    shapes = {x.shape for x in inputs if x.is_floating_point()}
    for func, args in calls.seen.items():
        forward = spec.differentiable and "backward" not in str(func) and "bwd" not in str(func)
        given = [
            x.clone().requires_grad_()
            if forward and isinstance(x, Tensor) and x.is_floating_point() and x.shape in shapes
            else x
            for x in args
        ]
        opcheck(func, tuple(given))


def compiles_once(spec: Spec, problem: Problem, device: str) -> None:
    """One node in a full graph, the same bits, and no new graph for new sizes."""
    problems = [{**problem, **change} for change in spec.growing[:4]]
    for dynamic in (None, True):
        calls = [(make_inputs(spec, p, device).values(), spec.options(p, device)) for p in problems]
        assert_compiles_once(
            spec.op, calls, kernels=spec.launches(problem), dynamic=dynamic,
            run=lambda op, call: run(spec, partial(op, **call[1]), call[0]),
        )  # fmt: skip


def fake_tensors_need_no_kernel(spec: Spec, problem: Problem, device: str) -> None:
    inputs = plain(make_inputs(spec, problem, device))
    op = spec.call(spec.op, problem, device)
    real = run(spec, op, inputs)
    outputs = op(*inputs)
    upstream = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    with launches(), FakeTensorMode() as mode:
        fakes, fake_upstream = ([mode.from_tensor(x) for x in xs] for xs in (inputs, upstream))
        fake = run(spec, spec.call(spec.op, problem, device), fakes, fake_upstream)
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def the_reference_runs_where_kernels_do_not(spec: Spec, problem: Problem, device: str) -> None:
    inputs = plain(make_inputs(spec, problem, "cpu"))
    op, ref = (spec.call(f, problem, "cpu") for f in (spec.op, spec.ref))
    with mock.patch.object(runtime, "INTERPRETING", False), launches():
        got = run(spec, op, inputs)
        torch.compiler.reset()
        compiled = run(spec, torch.compile(op, fullgraph=True, backend="eager"), inputs)
    for results in (got, compiled):
        for a, b in zip(results, run(spec, ref, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- bad arguments --------------------------------------------------------------------------------


def bad_arguments_are_named(spec: Spec, problem: Problem, device: str) -> None:
    """A dtype, a device or a size that does not fit: one line, before anything is launched."""
    inputs = dict(
        zip(make_inputs(spec, problem, device), plain(make_inputs(spec, problem, device)))
    )
    op = spec.call(spec.op, problem, device)
    for name, x in inputs.items():
        wrong = {
            "dtype": x.double() if x.is_floating_point() else x.float(),
            "complex": x.to(torch.complex64),
            "dimensions": x.new_ones(()),
        }
        if len(inputs) > 1:
            wrong["device"] = x.to("meta")
            wrong["size"] = torch.cat((x, x[..., :1]), -1)
        for kind, bad in wrong.items():
            with launches(), pytest.raises(ValueError, match=r"^\w+: expected ") as said:
                op(*{**inputs, name: bad}.values())
            message = str(said.value)
            assert message.split(":")[0] in inputs, (name, kind, message)
            assert "\n" not in message


ANYWHERE: tuple[Check, ...] = (
    errors_are_seen,
    strides_do_not_matter,
    no_rows,
    same_input_same_bits,
    opcheck_passes,
    compiles_once,
    fake_tensors_need_no_kernel,
    autocast_sets_the_dtype_of_outputs_alone,
    the_reference_runs_where_kernels_do_not,
    bad_arguments_are_named,
    offsets_may_pass_32_bits,
)
OF_GRADIENTS: tuple[Check, ...] = (
    strides_of_gradients_do_not_matter,
    gradients_of_some_inputs,
    a_second_derivative_raises,
    checkpointing_changes_nothing,
)


def checks(spec: Spec) -> tuple[Check, ...]:
    """Those that an op must pass at each of its structural problems."""
    return ANYWHERE + (OF_GRADIENTS if spec.differentiable else ())


def structural(spec: Spec) -> list[str]:
    return list(spec.structural or list(spec.problems)[:1])
