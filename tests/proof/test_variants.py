"""New sizes compile nothing anew: each kernel has one variant for any batch and length."""

import json

import pytest

from fastgpt.kernels.specs import SPECS
from tests.processes import printed_by

pytestmark = pytest.mark.xdist_group("variants")  # one worker counts for all
SCRIPT = """
import json
import torch
from fastgpt.kernels.proof.compile import compile_all, specialised
from fastgpt.kernels.proof.report import configs_of
from fastgpt.kernels.runtime import recording
from fastgpt.kernels.specs import SPECS
from tests.parity import several


def make(*sizes, below=0):
    dtype = torch.int64 if below else torch.float32
    return torch.empty(sizes, dtype=dtype, device="meta")


def step(spec, problem):
    if problem.get("M", 0) in (4096, 65_537) and "chunk_tokens" in problem:
        problem["chunk_tokens"] = 2000  # else thousands of chunks
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

label = "V=50304 bf16 valid=50257 in place"
rows = compile_all([config for config in configs_of([90]) if config.label == label], jobs=1)
loops = [[(loop.units["global"], loop.bytes // (32 * 16)) for loop in row.loops] for row in rows]
print(json.dumps([counts, loops]))
"""


@pytest.fixture(scope="module")
def printed():
    return json.loads(printed_by(SCRIPT))


@pytest.mark.parametrize("name", [name for name, x in SPECS.items() if x.launches(x.first)])
def test_new_sizes_compile_nothing(name, printed):
    spec = SPECS[name]
    for label in spec.structural:
        first, *others = printed[0][f"{name} {label}"]
        assert set(first) >= set(spec.launches({**spec.problems[label], **spec.changes.growing[0]}))
        assert others == [first] * len(others) != []


def test_padded_rows_of_logits_are_read_and_written_16_bytes_at_a_time(printed):
    """A mask at column 50,257 lies inside a vector, and would turn one access into eight."""
    # the loss reads, the gradient reads and writes: each over whole blocks (2 vectors a lane) and
    # over the rest (1)
    assert printed[1] == [[[n, n] for n in (2, 1, 4, 2)]]
