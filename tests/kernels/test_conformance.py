"""Every op against its `Spec`: errors at each problem, and all that holds whatever the op."""

import pytest
import torch

from fastgpt.kernels.specs import SPECS
from tests.kernels import conformance

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


PROVED = {name: spec for name, spec in SPECS.items() if not spec.random}


@pytest.mark.parametrize(
    ("name", "label", "dtype"),
    [
        pytest.param(name, label, dtype, id=f"{name}-{label}-{short}")
        for name, spec in PROVED.items()
        for label in spec.problems
        for short, dtype in DTYPES.items()
        # the interpreter truncates what it should round to bf16: a few problems show the casts
        if short != "bf16" or torch.cuda.is_available() or label in conformance.structural(spec)
    ],
)
def test_parity(name, label, dtype, device):
    conformance.parity(SPECS[name], SPECS[name].problems[label], device, dtype)


@pytest.mark.parametrize(
    ("name", "label", "check"),
    [
        pytest.param(name, label, check, id=f"{name}-{label}-{check.__name__}")
        for name, spec in PROVED.items()
        for label in conformance.structural(spec)
        for check in conformance.checks(spec)
    ],
)
def test_conforms(name, label, check, device):
    check(SPECS[name], SPECS[name].problems[label], device)
