"""LayerNorm and RMSNorm; on a CPU the kernels run in Triton's interpreter, on CUDA as they are."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastgpt.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fastgpt.kernels.norm.op import (
    add_layer_norm_ref,
    add_rms_norm_ref,
    layer_norm_ref,
    rms_norm_ref,
)
from tests.parity import awkward
from tests.proof import (
    assert_kernel_parity,
    assert_mutations_are_caught,
    forward_backward,
    guarded,
    launches,
)

# op -> (itself, its reference, its inputs, how many outputs)
OPS = {
    "layer_norm": (layer_norm, layer_norm_ref, ("x", "weight", "bias"), 1),
    "add_layer_norm": (
        add_layer_norm,
        add_layer_norm_ref,
        ("x", "residual", "weight", "bias"),
        2,
    ),
    "rms_norm": (rms_norm, rms_norm_ref, ("x", "weight"), 1),
    "add_rms_norm": (add_rms_norm, add_rms_norm_ref, ("x", "residual", "weight"), 2),
}
FWD, BWD, SUM = "_norm_fwd_kernel", "_norm_bwd_kernel", "_norm_sum_kernel"
WIDE = 8_192 + 40  # a row that the backward takes in parts
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}

all_ops = pytest.mark.parametrize("name", OPS)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def make(name, *shape, dtype=torch.float32, device="cpu", without=()):
    """Inputs of the op `name` for x of `shape`."""
    return {
        key: awkward(
            *(shape if key in ("x", "residual") else shape[-1:]), dtype=dtype, device=device
        )
        for key in OPS[name][2]
        if key not in without
    }


def named(op):
    """`op` taking the tensors that `inputs` names, by name; the others are None."""

    def of(inputs):
        keys = list(inputs)

        def call(*tensors, **options):
            given = dict(zip(keys, tensors, strict=True))
            return op(**{"weight": None, **given}, **options)

        return call

    return of


# --- the references -------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_references_are_torchs_own_in_fp64(eps):
    x, residual, weight, bias = make("add_layer_norm", 7, 12, dtype=torch.float64).values()
    total, n = x + residual, (12,)
    y, kept = add_layer_norm_ref(x, residual, weight, bias, eps)
    y_rms, kept_rms = add_rms_norm_ref(x, residual, weight, eps)
    assert torch.equal(kept, total)
    assert torch.equal(kept_rms, total)
    for got, true in (
        (y, F.layer_norm(total, n, weight, bias, eps)),
        (y_rms, F.rms_norm(total, n, weight, eps)),
        (layer_norm_ref(x, weight, bias, eps), F.layer_norm(x, n, weight, bias, eps)),
        (rms_norm_ref(x, None, eps), F.rms_norm(x, n, None, eps)),
    ):
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-12)


# --- errors ---------------------------------------------------------------------------------------

SHAPES = {
    "one-row": (1, 8),
    "masked-tail": (7, 123),
    "rows-and-columns-masked": (21, 60),
    "more-tiles-than-programs": (23, 520),
    "three-dimensions": (3, 5, 200),
    "gpt2-small": (9, 768),
    "gpt2-xl": (3, 1600),
}


@all_ops
@both_dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_norm_matches_reference(name, shape, dtype, device):
    op, ref, _, _ = OPS[name]
    inputs = make(name, *shape, dtype=dtype, device=device)
    assert_kernel_parity(op, ref, inputs, kernels=(FWD, BWD, SUM))


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("N", [8192, WIDE])
def test_wide_rows(name, N, device):
    op, ref, _, _ = OPS[name]
    kernels = (FWD, BWD, SUM, "_norm_dots_kernel")[: 3 + (N > 8192)]
    assert_kernel_parity(op, ref, make(name, 3, N, device=device), kernels=kernels)


def test_more_programs_than_a_block_of_the_final_sum(device, monkeypatch):
    monkeypatch.setattr("fastgpt.kernels.norm.device.multiprocessors", lambda _: 5)
    inputs = make(
        "layer_norm", 80 * 16 + 3, 16, device=device
    )  # 80 programs of 16 rows, 64 a block
    assert_kernel_parity(layer_norm, layer_norm_ref, inputs, kernels=(FWD, BWD, SUM))


def test_one_column(device):
    inputs = make("layer_norm", 5, 1, device=device)
    assert_kernel_parity(layer_norm, layer_norm_ref, inputs, kernels=(FWD, BWD, SUM))
    del inputs["bias"]  # eps of 1: with less, what is left of dx is smaller than its rounding
    assert_kernel_parity(rms_norm, rms_norm_ref, inputs, kernels=(FWD, BWD, SUM), eps=1.0)


@both_dtypes
@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("layer_norm", ("bias",)),
        ("layer_norm", ("weight", "bias")),
        ("add_layer_norm", ("bias",)),
        ("add_layer_norm", ("weight",)),
        ("rms_norm", ("weight",)),
        ("add_rms_norm", ("weight",)),
    ],
    ids=str,
)
def test_weight_and_bias_are_optional(name, without, dtype, device):
    inputs = make(name, 7, 24, dtype=dtype, device=device, without=without)
    op, ref = (named(f)(inputs) for f in OPS[name][:2])
    assert_kernel_parity(op, ref, inputs, kernels=(FWD, BWD), eps=0.1)


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_norm_matches_reference_at_any_shape(data, device):
    name = data.draw(st.sampled_from(list(OPS)))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    shape = (*data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
             data.draw(st.integers(2, 300)))  # fmt: skip
    optional = [key for key in OPS[name][2] if key in ("weight", "bias")]
    without = data.draw(st.sets(st.sampled_from(optional)))
    inputs = make(name, *shape, dtype=dtype, device=device, without=without)
    op, ref = (named(f)(inputs) for f in OPS[name][:2])
    assert_kernel_parity(op, ref, inputs, kernels=(FWD, BWD), eps=data.draw(st.floats(1e-3, 1)))


MIXED = {
    # x, residual, weight, bias -> y, sum; the narrowest comes first
    "fp16-with-fp32-weights": ("float16", "float16", "float32", "float32", "float16", "float16"),
    "fp16-on-fp32-stream": ("float16", "float32", "float32", "float16", "float16", "float32"),
    "bf16-with-fp32-weights": (
        "bfloat16",
        "bfloat16",
        "float32",
        "float32",
        "bfloat16",
        "bfloat16",
    ),
    "bf16-on-fp32-stream": ("bfloat16", "float32", "bfloat16", "float32", "bfloat16", "float32"),
    "fp32-on-fp16-stream": ("float32", "float16", "float32", "float32", "float32", "float32"),
}


@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_dtypes_may_differ(name, dtypes, device):
    *of_inputs, of_y, of_sum = (getattr(torch, dtype) for dtype in dtypes)
    op, ref, _, _ = OPS[name]

    def cast(f):
        def of(*tensors):
            if tensors[0].dtype == torch.float64:  # the truth
                return f(*tensors)
            return f(*(t.to(d) for t, d in zip(tensors, of_inputs, strict=False)))

        return of

    # of the narrowest dtype, so that only what comes out is rounded
    inputs = make(name, 16, 120, dtype=min(of_inputs, key=lambda d: d.itemsize), device=device)
    y, total = cast(op)(*inputs.values())
    assert (y.dtype, total.dtype) == (of_y, of_sum)
    assert_kernel_parity(cast(op), cast(ref), inputs, kernels=(FWD, BWD, SUM))


def test_bf16_in_and_out(device):
    inputs = make("add_layer_norm", 16, 120, dtype=torch.bfloat16, device=device)
    assert_kernel_parity(add_layer_norm, add_layer_norm_ref, inputs, kernels=(FWD, BWD, SUM))


@all_ops
def test_parity_catches_one_percent(name, device):
    op, ref, _, outputs = OPS[name]
    inputs = make(name, 9, 40, device=device)
    assert_mutations_are_caught(op, ref, inputs, outputs=outputs)


def test_guards_catch_a_write_outside_of_a_buffer_and_a_missing_one():
    def write_four_of_three():
        with guarded():
            torch.empty(2, 3)[1].as_strided((4,), (1,)).zero_()

    with pytest.raises(AssertionError, match="outside of a buffer of 6"):
        write_four_of_three()
    with guarded() as buffers:
        torch.empty((2, 3))[0] = 0
    assert buffers[0].isnan().tolist() == [[False] * 3, [True] * 3]
    with pytest.raises(AssertionError, match=f"not launched: {FWD}"), launches(FWD):
        pass
    with pytest.raises(AssertionError, match=FWD), launches():
        layer_norm(awkward(2, 4), None)


# --- values ---------------------------------------------------------------------------------------


def test_variance_takes_two_passes(device):
    """Mean 1e4 and deviation 1: E[x**2] - E[x]**2 in fp32 would keep no digit of the variance."""
    inputs = {"x": awkward(6, 300, device=device) + 1e4}
    assert_kernel_parity(lambda x: layer_norm(x, None), lambda x: layer_norm_ref(x, None), inputs,
                         kernels=(FWD, BWD))  # fmt: skip


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_statistics_are_those_of_the_rounded_sum(name, device):
    """The backward sees no other; near 1000 an fp16 sum is off by up to a quarter."""
    inputs = make(f"add_{name}", 5, 40, dtype=torch.float16, device=device)
    inputs["x"] = 1000 + inputs["x"]
    y, total = OPS[f"add_{name}"][0](*inputs.values())
    weights = list(inputs.values())[2:]
    assert torch.equal(y, OPS[name][0](total, *weights))


def test_constant_rows_give_the_bias(device):
    x = torch.full((3, 40), 7.0, device=device)
    weight, bias = awkward(40, device=device), awkward(40, device=device)
    y, _, *gradients = forward_backward(lambda *t: (layer_norm(*t), t[0] * 1), [x, weight, bias])
    assert torch.equal(y, bias.expand(3, 40))
    assert all(d.isfinite().all() for d in gradients)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_row(value, device):
    x, residual, weight, bias = make("add_layer_norm", 19, 40, device=device).values()
    x[4, 7] = value
    y, total = add_layer_norm(x, residual, weight, bias)
    assert y[4].isnan().all()
    assert not total[4, 7].isfinite()
    others = torch.arange(19, device=device) != 4
    assert y[others].isfinite().all()


def test_same_input_same_bits(device):
    inputs = make("add_layer_norm", 23, 520, device=device)
    first = forward_backward(add_layer_norm, inputs.values())
    for _ in range(3 if device == "cpu" else 1000):
        again = forward_backward(add_layer_norm, inputs.values())
        assert all(map(torch.equal, first, again))
