"""Tests specific to bias and activation; `test_conformance` checks every op."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgpt.kernels import bias_act
from fastgpt.kernels.bias_act.op import ACTIVATIONS, bias_act_ref
from fastgpt.kernels.bias_act.spec import BIAS_ACT, BWD, FWD
from tests.kernels import conformance
from tests.parity import forward_backward

all_kinds = pytest.mark.parametrize("kind", ACTIVATIONS)


def make(kind, *shape, dtype=torch.float32, device="cpu"):
    """Makes random inputs of `bias_act` whose output has `shape`."""
    *rows, N = shape
    problem = {"M": tuple(rows), "N": N * (2 if kind == "swiglu" else 1)}
    return conformance.make_inputs(BIAS_ACT, problem, device, dtype)


def of(kind, f=bias_act):
    return lambda x, bias=None: f(x, bias, kind)


@all_kinds
def test_reference_is_the_formula_in_fp64(kind):
    x, bias = make(kind, 7, 12, dtype=torch.float64).values()
    z = x + bias
    gate, up = z.chunk(2, dim=-1)
    want = {
        "gelu_tanh": z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "gelu_erf": z / 2 * (1 + torch.erf(z / math.sqrt(2))),
        "relu": z.clamp(min=0),
        "relu_squared": z.clamp(min=0) ** 2,
        "swiglu": gate / (1 + torch.exp(-gate)) * up,
    }[kind]
    torch.testing.assert_close(bias_act_ref(x, bias, kind), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bias_act_ref(x + bias, None, kind), want, rtol=1e-12, atol=1e-12)


@given(data=st.data())
@conformance.examples(max_examples=25)
def test_any_shape(data, device):
    kind = data.draw(st.sampled_from(list(ACTIVATIONS)))
    N = data.draw(st.integers(1, 300)) * (2 if kind == "swiglu" else 1)
    problem = {"M": data.draw(conformance.sizes(0, 3, 9)), "N": N, "kind": kind}
    problem["bias"] = data.draw(st.booleans())
    conformance.parity(BIAS_ACT, problem, device, data.draw(conformance.ANY_DTYPE))


@pytest.mark.parametrize("kind", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("dtype", conformance.DTYPES)
def test_dtypes_may_differ(dtype, kind, device):
    problem = {"M": 16, "N": 240 if kind == "swiglu" else 120, "kind": kind}
    of_x, of_bias = conformance.DTYPES[dtype], torch.bfloat16 if dtype == "fp32" else torch.float32
    conformance.assert_dtypes_may_differ(BIAS_ACT, problem, device, [of_x, of_bias], [of_x])


def test_gelu_by_erf_keeps_its_tail(device):
    """At -5 and -6 the sum 1 + erf(z / sqrt(2)) has hardly any digits."""
    z = torch.linspace(-8, -1, 200, device=device)[None]
    y, slope = forward_backward(of("gelu_erf"), [z], [torch.ones_like(z)])
    z = z.double()
    tail, bell = torch.special.erfc(z / -math.sqrt(2)) / 2, torch.exp(-(z**2) / 2)
    true = tail + z * bell / math.sqrt(2 * math.pi)
    torch.testing.assert_close(y.double(), z * tail, rtol=2e-2, atol=0)
    torch.testing.assert_close(slope.double(), true, rtol=1e-3, atol=1e-7)


@all_kinds
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_place(value, kind, device):
    x, bias = make(kind, 9, 40, device=device).values()
    want = forward_backward(of(kind), [x, bias])
    x[4, 7] = value
    got = forward_backward(of(kind), [x, bias])
    if math.isnan(value):  # it is not taken for a number below 0
        assert got[0][4, 7].isnan()
    for a, b in zip(got, want, strict=True):
        changed = torch.zeros_like(a, dtype=torch.bool)
        changed[..., 7::40] = True
        torch.testing.assert_close(a[~changed], b[~changed], rtol=0, atol=0)


@all_kinds
def test_large_inputs_lose_nothing(kind, device):
    """Their exponentials overflow or vanish."""
    x = 1e3 * make(kind, 9, 40, device=device)["x"]
    conformance.assert_kernel_parity(of(kind), of(kind, bias_act_ref), {"x": x}, (FWD, BWD))


def test_what_is_saved_is_what_came_in(device):
    x, bias = (t.requires_grad_() for t in make("swiglu", 9, 40, device=device).values())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_act(x, bias, "swiglu")
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), bias.data_ptr()]
