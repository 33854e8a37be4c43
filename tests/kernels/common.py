"""Helpers for tests of single ops: random problems, and tensors whose dtypes differ."""

from dataclasses import replace
from functools import partial

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from tests.kernels import conformance
from tests.parity import several

# It would draw constants of the source as well: other examples after each change of any line.
providers._get_local_constants = lambda: providers._local_constants

examples = partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # of the device, which stays
)
"""Decorator for property tests: every run draws the same examples."""
DTYPES = st.sampled_from([torch.float32, torch.float16])


def sizes(least, most, largest):
    """Returns a Hypothesis strategy for leading sizes: `least` to `most`, each 1 to `largest`."""
    return st.lists(st.integers(1, largest), min_size=least, max_size=most).map(tuple)


def assert_dtypes_may_differ(spec, problem, device, of_inputs, of_outputs):
    """Checks the tolerance for inputs and outputs that each have a dtype of their own."""

    def cast(f):
        def call(*tensors, **options):
            if tensors[0].dtype != torch.float64:  # the truth
                tensors = (x.to(dtype) for x, dtype in zip(tensors, of_inputs))
            return f(*tensors, **options)

        return call

    mixed = replace(spec, op=cast(spec.op), ref=cast(spec.ref), eager=cast(spec.ref))
    # drawn in the narrowest, so that only what comes out is rounded
    narrow = min(of_inputs, key=lambda dtype: dtype.itemsize)
    inputs = conformance.make_inputs(mixed, problem, device, narrow)
    outputs = several(mixed.call(mixed.op, problem, device)(*inputs.values()))
    assert [y.dtype for y in outputs] == of_outputs
    conformance.parity(mixed, problem, device, narrow)
