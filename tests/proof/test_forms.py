"""New sizes compile nothing anew: each kernel has one form whatever the batch and the length."""

import json

import pytest

from fastgpt.kernels.specs import SPECS
from tests.parity import printed_by

COUNT = """
import json
import torch
from fastgpt.kernels.proof.compile import specialised
from fastgpt.kernels.runtime import recording
from fastgpt.kernels.specs import SPECS


def make(*sizes, below=0):
    dtype = torch.int64 if below else torch.bfloat16
    return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=not below)


def step(spec, problem):
    leaves = spec.inputs(problem, make)
    wanted = [x for x in leaves.values() if x.requires_grad and spec.differentiable]
    leaves = {k: x * 1 if spec.overwritten == k else x for k, x in leaves.items()}
    with torch.set_grad_enabled(spec.differentiable):
        outputs = spec.call(spec.op, problem, "meta")(*leaves.values())
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if wanted:
        torch.autograd.grad(outputs, wanted, [torch.empty_like(y) for y in outputs])


counts = {}
for spec in SPECS.values():
    forms = {}
    for change in spec.growing:
        with recording(90) as launches:
            step(spec, {**next(iter(spec.problems.values())), **change})
        for launch in launches:
            forms.setdefault(launch.kernel.__name__, set()).add(repr(specialised(launch)))
    counts[spec.name] = {name: len(seen) for name, seen in sorted(forms.items())}
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts():
    return json.loads(printed_by(COUNT))


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.random])
def test_new_sizes_compile_nothing(name, counts):
    spec = SPECS[name]
    problem = {**next(iter(spec.problems.values())), **spec.growing[0]}
    assert counts[name] == dict.fromkeys(sorted(spec.launches(problem)), 1)
