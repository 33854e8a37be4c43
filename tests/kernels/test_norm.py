"""Tests specific to LayerNorm and RMSNorm; `test_conformance` checks every op."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fastgpt.kernels.norm.op import norm_ref
from fastgpt.kernels.norm.spec import BWD, FWD, SPECS, SUM
from tests.kernels import conformance
from tests.kernels.conformance import DTYPES, assert_kernel_parity
from tests.parity import awkward, forward_backward

SPEC = {spec.name: spec for spec in SPECS}
summed = pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])


def make(name, M, N, dtype=torch.float32, device="cpu", **more):
    return conformance.make_inputs(SPEC[name], {"M": M, "N": N, **more}, device, dtype)


@given(data=st.data())
@conformance.examples(max_examples=25)
def test_any_shape(data, device):
    spec, dtype = data.draw(st.sampled_from(SPECS)), data.draw(conformance.ANY_DTYPE)
    problem = {
        "M": data.draw(conformance.sizes(1, 3, 9)),
        # of two columns, normalised to -1 and 1, the gradient of x is less than its rounding error
        "N": data.draw(st.integers(3, 300)),
        "eps": data.draw(st.floats(1e-3, 1)),
        "without": data.draw(st.sampled_from([(), ("bias",), ("weight", "bias")])),
    }
    conformance.parity(spec, problem, device, dtype)


def test_more_programs_than_a_block_of_the_final_sum(device, monkeypatch):
    monkeypatch.setattr("fastgpt.kernels.norm.device.multiprocessors", lambda _: 5)
    # 80 programs of 16 rows, 64 a block
    conformance.parity(SPEC["layer_norm"], {"M": 80 * 16 + 3, "N": 16}, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_bias_without_a_weight(dtype, device):
    inputs = make("layer_norm", 7, 24, dtype, device)
    assert_kernel_parity(
        lambda x, bias: layer_norm(x, None, bias), lambda x, bias: norm_ref(x, None, bias)[0],
        {"x": inputs["x"], "bias": inputs["bias"]}, (FWD, BWD, SUM),
    )  # fmt: skip


@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32], ids=str)
@summed
def test_the_bias_of_x_under_autocast(name, residual, device):
    """The sum has the dtype of x + residual, and is as exact as one that is rounded once."""
    inputs = make(name, 16, 120, device=device, x_bias=True)
    inputs["x"], inputs["residual"] = inputs["x"].bfloat16(), inputs["residual"].to(residual)
    leaves = [x.requires_grad_() for x in inputs.values()]
    with torch.autocast(device, torch.bfloat16):
        y, total = SPEC[name].op(*leaves, x_bias=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, residual)
    x, stream, *_, x_bias = leaves
    expected = (x.double() + x_bias.double() + stream.double()).float().to(residual)
    torch.testing.assert_close(total, expected, rtol=2e-7, atol=1e-6)
    gradients = torch.autograd.grad((y, total), leaves, (y.detach(), total.detach()))
    assert [d.dtype for d in gradients] == [t.dtype for t in leaves]
    sums = gradients[1].double().sum(0).float()
    torch.testing.assert_close(gradients[-1], sums, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize(
    "dtypes",  # of x, residual, weight, bias -> y, sum
    [
        "fp16 fp16 fp32 fp32 fp16 fp16", "fp16 fp32 fp32 fp16 fp16 fp32",
        "bf16 bf16 fp32 fp32 bf16 bf16", "bf16 fp32 bf16 fp32 bf16 fp32",
        "fp32 fp16 fp32 fp32 fp32 fp32",
    ],
)  # fmt: skip
@summed
def test_dtypes_may_differ(name, dtypes, device):
    *of_inputs, of_y, of_sum = map(DTYPES.get, dtypes.split())
    problem = {"M": 16, "N": 120} if device == "cpu" else {"M": 16_384, "N": 1600}
    conformance.assert_dtypes_may_differ(SPEC[name], problem, device, of_inputs, [of_y, of_sum])


def test_variance_takes_two_passes(device):
    """The variance of rows of mean 1e4 is right, where E[x**2] - E[x]**2 in fp32 is not."""
    inputs = {"x": awkward(6, 300, device=device) + 1e4}
    plain = (lambda x: layer_norm(x, None)), (lambda x: norm_ref(x)[0])
    assert_kernel_parity(*plain, inputs, (FWD, BWD))


@summed
def test_statistics_are_those_of_the_rounded_sum(name, device):
    """Near 1000 an fp16 sum is off by up to a quarter; the backward sees the rounded one."""
    x, *others = make(name, 5, 40, torch.float16, device).values()
    y, total = SPEC[name].op(1000 + x, *others)
    assert torch.equal(y, SPEC[name.removeprefix("add_")].op(total, *others[1:]))


def test_constant_rows_give_the_bias(device):
    x = torch.full((3, 40), 7.0, device=device)
    weight, bias = awkward(40, device=device), awkward(40, device=device)
    y, *gradients = forward_backward(layer_norm, [x, weight, bias])
    assert torch.equal(y, bias.expand(3, 40))
    assert all(d.isfinite().all() for d in gradients)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_row(value, device):
    x, *others = make("add_layer_norm", 19, 40, device=device).values()
    x[4, 7] = value
    y, total = add_layer_norm(x, *others)
    assert y[4].isnan().all()
    assert not total[4, 7].isfinite()
    assert y[torch.arange(19, device=device) != 4].isfinite().all()


def test_the_residuals_gradient_is_written_only_where_its_dtype_differs(device):
    x, residual, weight = make("add_rms_norm", 5, 24, device=device).values()
    for dtype in (torch.float32, torch.float16):
        tensors = [x.to(dtype).detach().requires_grad_(), residual.detach().requires_grad_()]
        y, total = add_rms_norm(*tensors, weight)
        dx, dresidual = torch.autograd.grad((y, total), tensors, (y.detach(), total.detach()))
        assert (dx.data_ptr() == dresidual.data_ptr()) == (dtype == torch.float32)
        assert torch.equal(dresidual.to(dtype), dx)
    assert not torch.equal(dresidual, dx.float())  # it was not rounded to x's dtype on the way


def test_a_second_derivative_through_the_dispatcher_raises(device):
    """Selective checkpointing listens to the dispatcher in the same way."""
    x = awkward(3, 8, device=device).requires_grad_()
    with conformance.Calls() as calls:
        (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            dx.sum().backward()
    assert [*map(str, calls.seen)] == ["fastgpt.norm_fwd.default", "fastgpt.norm_bwd.default"]
