"""Every op on a GPU, at realistic sizes; the checks are made from its `Spec`.

`tests/kernels/test_conformance.py` runs on CUDA as well; this file has the checks that need a GPU.
Without one the tests are skipped with the reason.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.measure import Checker
from bench.ops import cases
from fastgpt.kernels.specs import SPECS
from tests.kernels.conformance import apart, careful, run
from tests.kernels.cuda.proof import (
    assert_nothing_waits,
    assert_on_the_current_stream,
    assert_replays,
    assert_same_bits,
    fitting,
)
from tests.parity import awkward, launches, several

pytestmark = pytest.mark.gpu
KERNELS = [name for name, spec in SPECS.items() if spec.sizes["cuda"]]
every_op = pytest.mark.parametrize("name", KERNELS)


def step_of(name, problem, dtype=torch.bfloat16):
    """Returns (contiguous inputs, a function that computes their outputs and gradients)."""
    spec = SPECS[name]

    def make(*sizes, below=0):
        if below:
            return torch.randint(below, sizes, device="cuda")
        return awkward(*sizes, dtype=dtype, device="cuda")

    made = spec.inputs(problem, make)
    inputs = [x.clone(memory_format=torch.contiguous_format) for x in made.values()]
    for x in inputs:
        x.requires_grad_(spec.differentiable and x.is_floating_point())
    op, over = spec.call(spec.op, problem, "cuda"), problem.get("inplace_grad")
    upstream = []

    def step():
        # an op may write over an input, which must not be a leaf
        outputs = several(op(*(x * 1 if over else x for x in inputs)))
        if not spec.differentiable:
            return outputs
        if not upstream:
            upstream.extend(awkward(*y.shape, dtype=y.dtype, device="cuda") for y in outputs)
        wanted = [x for x in inputs if x.requires_grad]
        return [*outputs, *torch.autograd.grad(outputs, wanted, upstream)]

    return inputs, step


def small(name):
    """Returns problems that reach each branch of an op."""
    return [SPECS[name].problems[label] for label in SPECS[name].structural]


def typical(name):
    return fitting(next(iter(SPECS[name].sizes["cuda"].values())))


CASES = cases("cuda", tuple(KERNELS), dtype=("bf16", "fp16", "fp32"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_keep_the_rule_beside_pytorchs_own(case):
    case = replace(case, shape=fitting(case.shape))
    with launches(*case.spec.launches(case.shape)):
        wrong, _ = Checker(case, "cuda").complaints(case.implementations()["ours"]("cuda"))
    assert wrong == []


@every_op
def test_a_thousand_steps_give_the_same_bits(name):
    assert_same_bits(step_of(name, typical(name))[1])


@every_op
def test_nothing_waits_for_the_device(name):
    for problem in (typical(name), *small(name)):
        assert_nothing_waits(step_of(name, problem)[1], *SPECS[name].launches(problem))


@every_op
def test_a_captured_graph_replays_with_new_inputs(name):
    inputs, step = step_of(name, typical(name))
    assert_replays(step, [x for x in inputs if x.is_floating_point()])


@every_op
def test_kernels_run_on_the_current_stream(name):
    inputs, step = step_of(name, typical(name))
    assert_on_the_current_stream(step, inputs[0])


@every_op
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_their_tensors(name):
    spec, problem = SPECS[name], SPECS[name].first
    inputs = [x.detach().to("cuda:1") for x in step_of(name, problem)[0]]
    op = spec.call(spec.op, problem, "cuda:1")
    got = run(spec, op, inputs)
    with torch.cuda.device(1):
        assert all(map(torch.equal, got, run(spec, op, inputs)))


@every_op
def test_compiled_by_inductor_it_is_the_same(name):
    spec = careful(SPECS[name])
    for problem in small(name):
        torch.compiler.reset()
        for change in spec.changes.growing:
            grown = {**problem, **change}
            inputs, _ = step_of(name, grown)
            with launches(*spec.launches(grown)):
                compiled = torch.compile(spec.call(spec.op, grown, "cuda"), fullgraph=True)
                got = run(spec, compiled, inputs)
            eager = spec.call(partial(apart, spec), grown, "cuda")
            assert all(map(torch.equal, got, run(spec, eager, inputs)))
