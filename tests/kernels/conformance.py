"""Checks that every op must pass, as functions of its `Spec`: `test_conformance` runs them.

On a CPU the kernels run in Triton's interpreter, on CUDA compiled. A check takes (spec, problem,
device) and raises AssertionError.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import runtime
from fastgpt.kernels.parity import Op, complaints
from fastgpt.kernels.spec import Problem, Spec
from tests.parity import (
    LAYOUTS,
    assert_parity,
    awkward,
    forward_backward,
    guarded,
    launches,
    results,
    several,
)

Check = Callable[[Spec, Problem, str], None]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# --- property tests -------------------------------------------------------------------------------

# It would draw constants of the source as well: other examples after each change of any line.
providers._get_local_constants = lambda: providers._local_constants
examples = partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # of the device, which stays
)
"""Decorator for property tests: every run draws the same examples."""
ANY_DTYPE = st.sampled_from([torch.float32, torch.float16])


def sizes(least: int, most: int, largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Returns a strategy for leading sizes: `least` to `most`, each 1 to `largest`."""
    return st.lists(st.integers(1, largest), min_size=least, max_size=most).map(tuple)


# --- calls ----------------------------------------------------------------------------------------


def make_inputs(
    spec: Spec, problem: Problem, device: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Makes a problem's tensors, each row between NaN that no kernel may read."""

    def make(*sizes: int, below: int = 0) -> Tensor:
        if below:
            return torch.randint(below, sizes).to(device)
        return awkward(*sizes, dtype=dtype, device=device)

    return spec.inputs(problem, make)


def plain(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns copies of the tensors with contiguous strides."""
    return [x.clone(memory_format=torch.contiguous_format) for x in inputs.values()]


def run(spec: Spec, op: Callable[..., Any], tensors: Any, upstream: Any = None) -> list[Tensor]:
    """Runs an op and returns its outputs, followed by gradients if it has any."""
    if spec.differentiable:
        return forward_backward(op, tensors, upstream)
    with torch.no_grad():
        return several(op(*tensors))


def careful(spec: Spec) -> Spec:
    """Returns a `Spec` whose op works on copies, if the op would overwrite an input."""

    def op(*tensors: Tensor, **options: Any) -> Any:
        if options.get("inplace_grad"):
            tensors = tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
        return spec.op(*tensors, **options)

    overwrites = any("inplace_grad" in problem for problem in spec.problems.values())
    return replace(spec, op=op) if overwrites else spec


def apart(spec: Spec, *tensors: Tensor, **options: Any) -> Any:
    """Calls the op as torch.compile does: nothing is overwritten, gradients are rounded once."""
    options |= {"inplace_grad": False} if "inplace_grad" in options else {}
    return spec.op(*tensors, **options)


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = 0) -> None:
    """Asserts equal bits, or numbers, in the same layout; NaN equals NaN."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert a.stride() == b.stride()


def same_in_another_layout(got: list[Tensor], want: list[Tensor]) -> None:
    """`assert_same`; compiled, other strides are another specialisation, with another order."""
    assert_same(got, want, 0 if runtime.INTERPRETING else 1e-5)


# --- errors ---------------------------------------------------------------------------------------


def the_reference_is_pytorchs_own(spec: Spec, problem: Problem, device: str) -> None:
    """Compares in fp64, where two ways to compute the same differ by rounding alone."""
    inputs = make_inputs(spec, problem, device, torch.float64).values()
    ref, eager = (spec.call(f, problem, device) for f in (spec.ref, spec.eager))
    ours, pytorchs = run(spec, ref, inputs), run(spec, eager, inputs)
    torch.testing.assert_close(ours, pytorchs, rtol=1e-12, atol=1e-12)


def parity(spec: Spec, problem: Problem, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Checks that results are within the tolerance, and no memory around buffers is written."""
    torch.manual_seed(0)  # Hypothesis does not: an example would depend on those before it
    inputs = make_inputs(spec, problem, device, dtype)
    op, ref, eager = (spec.call(f, problem, device) for f in (spec.op, spec.ref, spec.eager))
    terms = {"gradients": spec.differentiable, "terms": spec.terms(problem)}
    assert_kernel_parity(op, ref, inputs, spec.launches(problem), eager=eager, **terms)


def assert_kernel_parity(
    op: Op, ref: Op, inputs: Mapping[str, Tensor], kernels: Iterable[str], **options: Any
) -> None:
    """`assert_parity` with poison around every buffer, and each of `kernels` launched."""
    with launches(*kernels), guarded():
        assert_parity(op, ref, inputs, **options)


def assert_dtypes_may_differ(
    spec: Spec, problem: Problem, device: str, of_inputs: list, of_outputs: list
) -> None:
    """Checks the tolerance for inputs and outputs that each have a dtype of their own."""

    def cast(f: Op) -> Op:
        def call(*tensors: Tensor, **options: Any) -> Any:
            if tensors[0].dtype != torch.float64:  # the truth
                tensors = tuple(x.to(dtype) for x, dtype in zip(tensors, of_inputs))
            return f(*tensors, **options)

        return call

    mixed = replace(spec, op=cast(spec.op), ref=cast(spec.ref), eager=cast(spec.ref))
    # drawn in the narrowest, so that only what comes out is rounded
    narrow = min(of_inputs, key=lambda dtype: dtype.itemsize)
    inputs = make_inputs(mixed, problem, device, narrow)
    outputs = several(mixed.call(mixed.op, problem, device)(*inputs.values()))
    assert [y.dtype for y in outputs] == of_outputs
    parity(mixed, problem, device, narrow)


def errors_are_seen(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that an error of 1 % or a wrong sign in any output or gradient is noticed."""
    inputs = make_inputs(spec, problem, device)
    op, ref = spec.call(spec.op, problem, device), spec.call(spec.ref, problem, device)
    called = partial(results, inputs=inputs, gradients=spec.differentiable)
    right, eager, truth = (
        called(f, dtype)
        for f, dtype in ((op, torch.float32), (ref, torch.float32), (ref, torch.float64))
    )
    assert complaints(right, eager, truth, torch.float32, spec.terms(problem)) == []
    for factor in (1.01, -1.0):
        for name, x in right.items():
            said = complaints({**right, name: factor * x}, eager, truth, torch.float32)
            assert said, name
            assert [line for line in said if not line.startswith(name)] == [], name


# --- memory ---------------------------------------------------------------------------------------


def far_apart(x: Tensor) -> Tensor:
    """Copies x with over 2**30 elements between its three rows; few pages of memory are used."""
    if 3 not in x.shape[:-1]:
        return x
    dim, stride = x.shape[:-1].index(3), (1 << 30) + 8
    rows = x.movedim(dim, 0)
    inner = rows[0].clone(memory_format=torch.contiguous_format).stride()
    memory = torch.empty(2 * stride + rows[0].numel(), dtype=x.dtype, device=x.device)
    return memory.as_strided(rows.shape, (stride, *inner)).copy_(rows).movedim(0, dim)


def strides_do_not_matter(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that any layout of any input gives the bits of a contiguous one."""
    inputs = make_inputs(spec, problem, device)
    op, contiguous = spec.call(spec.op, problem, device), dict(zip(inputs, plain(inputs)))
    want = run(spec, op, contiguous.values())
    for layout in LAYOUTS.values():
        for name, x in contiguous.items():
            if x.dim() < 3:
                continue
            moved = {**contiguous, name: layout(x)}
            with launches(*spec.launches(problem)), guarded():
                got = run(spec, op, moved.values())
            same = torch.equal(moved[name], x)
            same_in_another_layout(got, want if same else run(spec, op, plain(moved)))
    vectors = [x.repeat_interleave(2)[::2] if x.dim() == 1 else x for x in contiguous.values()]
    same_in_another_layout(run(spec, op, vectors), want)


def strides_of_gradients_do_not_matter(spec: Spec, problem: Problem, device: str) -> None:
    inputs = make_inputs(spec, problem, device)
    op, contiguous = spec.call(spec.op, problem, device), plain(inputs)
    upstream = [awkward(*y.shape, device=device).to(y.dtype) for y in several(op(*contiguous))]
    want = run(spec, op, contiguous, upstream)
    for layout in (*LAYOUTS.values(), lambda dy: dy.flatten()[0].expand(dy.shape)):
        moved = [layout(dy) if dy.dim() > 1 else dy for dy in upstream]
        with guarded():
            got = run(spec, op, contiguous, moved)
        same = all(map(torch.equal, moved, upstream))
        copies = [dy.clone(memory_format=torch.contiguous_format) for dy in moved]
        same_in_another_layout(got, want if same else run(spec, op, contiguous, copies))


def offsets_may_pass_32_bits(spec: Spec, problem: Problem, device: str) -> None:
    assert spec.changes.far
    for change in spec.changes.far:
        op = spec.call(spec.op, {**problem, **change}, device)
        near = plain(make_inputs(spec, {**problem, **change}, device, torch.float16))
        upstream = [awkward(*y.shape).to(y) for y in several(op(*near))]
        want = run(spec, op, near, upstream)
        assert_same(run(spec, op, map(far_apart, near), map(far_apart, upstream)), want)


def no_rows(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that empty inputs give empty outputs, gradients of 0, and no launch."""
    assert spec.changes.empty
    for change in spec.changes.empty:
        inputs = make_inputs(spec, {**problem, **change}, device)
        op, ref = (spec.call(f, {**problem, **change}, device) for f in (spec.op, spec.ref))
        with launches(), guarded():
            got = run(spec, op, inputs.values())
        want = run(spec, ref, inputs.values())
        torch.testing.assert_close(got, want, equal_nan=True)  # dtypes and shapes as well


def same_input_same_bits(spec: Spec, problem: Problem, device: str) -> None:
    inputs = make_inputs(spec, problem, device)
    op = spec.call(spec.op, problem, device)
    first = run(spec, op, inputs.values())
    for _ in range(1 if device == "cpu" else 1000):
        assert_same(run(spec, op, inputs.values()), first)


# --- autograd -------------------------------------------------------------------------------------


def gradients_of_some_inputs(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that one gradient alone equals the one of a call for all of them."""
    inputs = make_inputs(spec, problem, device)
    op = spec.call(spec.op, problem, device)
    floating = [name for name, x in inputs.items() if x.is_floating_point()]

    def gradients(wanted: list[str]) -> list[Tensor]:
        leaves = {k: x.clone().requires_grad_(k in wanted) for k, x in inputs.items()}
        total = sum(y.square().sum() for y in several(op(*leaves.values())))
        return list(torch.autograd.grad(total, [leaves[name] for name in wanted]))

    for name, want in zip(floating, gradients(floating), strict=True):
        torch.testing.assert_close(gradients([name]), [want], rtol=1e-5, atol=1e-6)


def an_output_may_be_unused(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that an unused output has a gradient of 0."""
    inputs = plain(make_inputs(spec, problem, device))
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    ys = several(spec.call(spec.op, problem, device)(*inputs))
    for y in ys if len(ys) > 1 else ():
        upstream = [awkward(*y.shape).to(y) if z is y else torch.zeros_like(z) for z in ys]
        want = torch.autograd.grad(ys, leaves, upstream, retain_graph=True)
        got = torch.autograd.grad(
            y, leaves, [dy for dy, z in zip(upstream, ys) if z is y],
            retain_graph=True, materialize_grads=True,
        )  # fmt: skip
        torch.testing.assert_close(got, want)


def a_second_derivative_raises(spec: Spec, problem: Problem, device: str) -> None:
    leaves = plain(make_inputs(spec, problem, device))
    leaves = [x.requires_grad_(x.is_floating_point()) for x in leaves]
    y = several(spec.call(spec.op, problem, device)(*leaves))[0]
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
    count = len(several(op(*inputs.values())))
    with torch.autocast(device, torch.bfloat16):
        with launches(*spec.launches(problem)):
            got = run(spec, op, inputs.values())
        want = run(spec, ref, inputs.values())
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == (b.dtype if i < count else torch.float32)
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


# --- torch.compile and torch.library --------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records calls of our ops at torch's dispatcher, with detached arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == runtime.NAMESPACE:
            self.seen.setdefault(func, tree_map_only(Tensor, Tensor.detach, args))
        return func(*args, **(kwargs or {}))


def opcheck_passes(spec: Spec, problem: Problem, device: str) -> None:
    """Runs opcheck for each registered op, forward and backward, on arguments of a real call."""
    inputs = plain(make_inputs(spec, problem, device))
    with Calls() as calls:
        run(spec, spec.call(spec.op, problem, device), inputs)
    assert calls.seen
    sizes = {x.numel() for x in inputs if x.is_floating_point()}
    for i, (func, args) in enumerate(calls.seen.items()):
        forward = spec.differentiable and i == 0
        given = [
            x.clone().requires_grad_()
            if forward and isinstance(x, Tensor) and x.is_floating_point() and x.numel() in sizes
            else x
            for x in args
        ]
        opcheck(func, tuple(given))


def compiles_once(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that the op is one node in a full graph, with the same bits, for all sizes."""
    nodes, graphs = [], []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        nodes.append([n for n in graph.graph.nodes if "fastgpt" in str(n.target)])
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    # a graph takes 1 to 5 s of tracing: that Dynamo learns which sizes change is tried once
    first = problem == spec.first
    torch.compiler.reset()
    dynamic = None if first else True
    compiled = torch.compile(spec.op, fullgraph=True, dynamic=dynamic, backend=backend)
    for change in spec.changes.growing[: 4 if first else 2]:
        inputs = list(make_inputs(spec, {**problem, **change}, device).values())
        options = spec.options({**problem, **change}, device)
        with launches(*spec.launches(problem)):
            got = run(spec, partial(compiled, **options), inputs)
        want = run(spec, partial(apart, spec, **options), inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        graphs.append(len(nodes))
    assert all(len(found) == 1 for found in nodes)
    # where it is not told that sizes change, Dynamo learns it from the first two changes
    assert graphs[2 if first else 0] == graphs[-1]


def fake_tensors_need_no_kernel(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that fake tensors give outputs and gradients of equal shapes, dtypes and strides."""
    inputs = plain(make_inputs(spec, problem, device))
    for autocast in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            real = run(spec, spec.call(spec.op, problem, device), inputs)
            upstream = real[: len(real) - sum(x.is_floating_point() for x in inputs)]
            with launches(), FakeTensorMode() as mode:
                fakes, grads = ([mode.from_tensor(x) for x in xs] for xs in (inputs, upstream))
                fake = run(spec, spec.call(spec.op, problem, device), fakes, grads)
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def the_reference_runs_where_kernels_do_not(spec: Spec, problem: Problem, device: str) -> None:
    inputs = plain(make_inputs(spec, problem, "cpu"))
    op, ref = (spec.call(f, problem, "cpu") for f in (spec.op, spec.ref))
    with mock.patch.multiple(runtime, INTERPRETING=False, _fake_device=None), launches():
        got = run(spec, op, inputs)
        torch.compiler.reset()
        compiled = run(spec, torch.compile(op, fullgraph=True, backend="eager"), inputs)
    for found in (got, compiled):
        torch.testing.assert_close(found, run(spec, ref, inputs), rtol=1e-5, atol=1e-5)


# --- bad arguments --------------------------------------------------------------------------------


def bad_arguments_are_named(spec: Spec, problem: Problem, device: str) -> None:
    """Checks that a wrong dtype, device or size raises one line, before anything is launched."""
    made = make_inputs(spec, problem, device)
    inputs, op = dict(zip(made, plain(made))), spec.call(spec.op, problem, device)
    for name, x in inputs.items():
        wrong = {
            "dtype": x.double() if x.is_floating_point() else x.float(),
            "complex": x.to(torch.complex64),
            "dimensions": x.new_ones(()),
        }
        if len(inputs) > 1:
            wrong["device"] = x.to("meta")
        for kind, bad in wrong.items():
            with launches(), pytest.raises(ValueError, match=r"^\w+: expected ") as said:  # noqa: PT012
                op(*{**inputs, name: bad}.values())
                pytest.fail(f"{name} of wrong {kind} {(*bad.shape,)}, {bad.dtype}: nothing raised")
            message = str(said.value)
            assert message.split(":")[0] in inputs, (name, kind, message)
            assert "\n" not in message
        if len(inputs) > 1:
            grown = [torch.cat((x, x.narrow(dim, 0, 1)), dim) for dim in (-1, 0)]
            with pytest.raises(ValueError, match=r"^\w+: expected "):  # noqa: PT012
                # any number of rows or of columns may do, but not of both
                _ = [op(*{**inputs, name: bad}.values()) for bad in grown]
                pytest.fail(f"{name} with one more row, or one more column: nothing raised")


ANYWHERE: tuple[Check, ...] = (
    the_reference_is_pytorchs_own,
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
    an_output_may_be_unused,
    a_second_derivative_raises,
    checkpointing_changes_nothing,
)


def checks(spec: Spec) -> tuple[Check, ...]:
    """Returns the checks that an op must pass at each of its structural problems."""
    every = ANYWHERE + (OF_GRADIENTS if spec.differentiable else ())
    return tuple(check for check in every if check.__name__ not in spec.exempt)
