"""Tests every op against the reference in its `Spec`, and by the checks that all ops must pass."""

from dataclasses import replace

import pytest

from fastgpt.kernels.runtime import INTERPRETING
from fastgpt.kernels.specs import SPECS
from tests.kernels import conformance
from tests.kernels.conformance import DTYPES

PROVED = {name: conformance.careful(spec) for name, spec in SPECS.items() if not spec.random}
LONG = (
    conformance.compiles_once, conformance.opcheck_passes, conformance.offsets_may_pass_32_bits,
    conformance.strides_do_not_matter, conformance.strides_of_gradients_do_not_matter,
    conformance.checkpointing_changes_nothing, conformance.the_reference_runs_where_kernels_do_not,
)  # fmt: skip
"""Checks that take the most time, of an op's wrapper more than of its kernels."""
ALIKE = {"rms_norm", "add_rms_norm", "bias_act_swiglu"}
"""Ops that share their wrapper with another one."""


FURTHER = {
    "negative-scale", "zero-scale", "window-tail", "documents-tail", "bytes mean in place",
    "bytes none", "one-lane-left-over none in place", "splits-pages-and-starts",
    "two-tiles-of-rows-pages",
}  # fmt: skip
"""Labels of problems with branches and loops that the structural ones do not reach."""


def marks(spec, label, dtype):
    """Marks the structural problems in fp32 and bf16, and the typical one in bf16.

    Interpreted, most others run every night, and by `make op` where the op is touched.
    """
    brief = label in spec.structural and dtype != "fp16"
    quick = label == next(iter(spec.problems)) and dtype == "bf16"
    slow = INTERPRETING and not brief and not (label in FURTHER and dtype == "fp32")
    given = {"brief": brief, "quick": quick, "slow": slow}
    return [getattr(pytest.mark, name) for name, marked in given.items() if marked]


def is_slow(spec, label, check):
    return check in LONG and (label != spec.structural[0] or spec.name in ALIKE)


@pytest.mark.parametrize(
    ("name", "label", "dtype"),
    [
        pytest.param(
            name, label, dtype, id=f"{name}-{label}-{short}", marks=marks(spec, label, short)
        )
        for name, spec in PROVED.items()
        for label in spec.problems
        for short, dtype in DTYPES.items()
        # bf16 differs from fp16 in the casts, which a few problems show; compiled, in the products
        if short != "bf16" or not INTERPRETING or label in spec.structural
    ],
)
def test_parity(name, label, dtype, device):
    conformance.parity(PROVED[name], PROVED[name].problems[label], device, dtype)


@pytest.mark.parametrize(
    ("name", "label", "check"),
    [
        pytest.param(
            name, label, check, id=f"{name}-{label}-{check.__name__}",
            marks=[pytest.mark.slow] * is_slow(spec, label, check),
        )
        for name, spec in PROVED.items()
        for label in spec.structural
        for check in conformance.checks(spec)
    ],
)  # fmt: skip
def test_conforms(name, label, check, device):
    check(PROVED[name], PROVED[name].problems[label], device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name, spec in PROVED.items() if spec.cpu])
def test_what_the_model_calls_on_a_cpu_is_right(name, dtype):
    spec = replace(PROVED[name], op=PROVED[name].cpu, launches=lambda s: ())
    conformance.parity(spec, spec.sizes["cpu"].get("awkward", spec.first), "cpu", DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.random])
def test_random_outputs_keep_their_own_rule(name, dtype, device):
    spec = SPECS[name]
    for problem in spec.problems.values():
        inputs = conformance.make_inputs(spec, problem, device, DTYPES[dtype])
        y = spec.call(spec.op, problem, device)(*inputs.values())
        assert spec.random(inputs, y) == []
