"""New sizes compile nothing anew: each kernel has one variant for any batch and length."""

import json

import pytest

from fastgpt.kernels.specs import SPECS
from tests.processes import printed_by

COUNT = """
import json
import torch
from fastgpt.kernels.proof.compile import specialised
from fastgpt.kernels.runtime import recording
from fastgpt.kernels.specs import SPECS
from tests.parity import several


def make(*sizes, below=0):
    dtype = torch.int64 if below else torch.float32
    return torch.empty(sizes, dtype=dtype, device="meta")


def step(spec, problem):
    leaves = spec.inputs(problem, make).values()
    for x in leaves:
        x.requires_grad_(spec.differentiable and x.is_floating_point())
    ys = several(spec.call(spec.op, problem, "meta")(*leaves))
    if spec.differentiable:
        torch.autograd.backward(ys, [torch.empty_like(y) for y in ys])


counts = {}
for spec in SPECS.values():
    first = next(iter(spec.problems))
    for label in spec.structural if spec.launches(spec.first) else ():
        variants, seen = {}, []
        # sizes beyond the first four are of the first problem: a window of 7 is none at T = 1
        for change in spec.changes.growing[: None if label == first else 4]:
            with recording(90) as launches:
                step(spec, {**spec.problems[label], **change})
            for launch in launches:
                variants.setdefault(launch.kernel.__name__, set()).add(repr(specialised(launch)))
            seen.append({name: len(found) for name, found in variants.items()})
        counts[f"{spec.name} {label}"] = seen
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts():
    return json.loads(printed_by(COUNT))


@pytest.mark.parametrize("name", [name for name, x in SPECS.items() if x.launches(x.first)])
def test_new_sizes_compile_nothing(name, counts):
    spec = SPECS[name]
    for label in spec.structural:
        first, *others = counts[f"{name} {label}"]
        assert set(first) >= set(spec.launches({**spec.problems[label], **spec.changes.growing[0]}))
        assert others == [first] * len(others) != []
