"""Bias and activation; on a CPU the kernels run in Triton's interpreter, on CUDA as they are."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import bias_act, runtime
from fastgpt.kernels.bias_act.op import ACTIVATIONS, bias_act_ref
from tests.parity import awkward
from tests.proof import (
    LAYOUTS,
    assert_compiles_once,
    assert_kernel_parity,
    assert_mutations_are_caught,
    forward_backward,
    guarded,
    launches,
)

FWD, BWD, SUM = "_bias_act_fwd_kernel", "_bias_act_bwd_kernel", "_norm_sum_kernel"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}

all_kinds = pytest.mark.parametrize("kind", ACTIVATIONS)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
two_kinds = pytest.mark.parametrize("kind", ["gelu_tanh", "swiglu"])


def make(kind, *shape, dtype=torch.float32, device="cpu"):
    """Inputs that put out `shape`."""
    *rows, N = shape
    N *= 2 if kind == "swiglu" else 1
    return {
        "x": awkward(*rows, N, dtype=dtype, device=device),
        "bias": awkward(N, dtype=dtype, device=device),
    }


def of(kind, f=bias_act):
    """`f` of this kind; without a bias, if it is given none."""
    return lambda x, bias=None: f(x, bias, kind)


# --- the reference --------------------------------------------------------------------------------


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


def test_reference_is_torchs_own_after_a_projection():
    x, weight, bias = awkward(5, 8).double(), awkward(12, 8).double(), awkward(12).double()
    want = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    got = bias_act_ref(F.linear(x, weight), bias, "gelu_tanh")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# --- errors ---------------------------------------------------------------------------------------

SHAPES = {
    "one-element": (1, 1),
    "masked-tail": (7, 123),
    "more-tiles-than-programs": (90, 300),
    "three-dimensions": (3, 5, 40),
    "columns-in-parts": (11, 1030),
}


@all_kinds
@both_dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bias_act_matches_reference(shape, dtype, kind, device):
    inputs = make(kind, *shape, dtype=dtype, device=device)
    assert_kernel_parity(of(kind), of(kind, bias_act_ref), inputs, kernels=(FWD, BWD, SUM))


@all_kinds
def test_without_a_bias(kind, device):
    inputs = {"x": make(kind, 7, 40, device=device)["x"]}
    assert_kernel_parity(of(kind), of(kind, bias_act_ref), inputs, kernels=(FWD, BWD))


@all_kinds
def test_bf16_in_and_out(kind, device):
    """Of many elements: the interpreter cuts fp32 off where it should round it to bf16."""
    inputs = make(kind, 16, 120, dtype=torch.bfloat16, device=device)
    assert_kernel_parity(of(kind), of(kind, bias_act_ref), inputs, kernels=(FWD, BWD, SUM))


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_bias_act_matches_reference_at_any_shape(data, device):
    kind = data.draw(st.sampled_from(list(ACTIVATIONS)))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    rows = data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    inputs = make(kind, *rows, data.draw(st.integers(1, 300)), dtype=dtype, device=device)
    if data.draw(st.booleans()):
        del inputs["bias"]
    inputs["x"] *= data.draw(st.sampled_from([0.01, 1.0, 10.0]))
    assert_kernel_parity(of(kind), of(kind, bias_act_ref), inputs, kernels=(FWD, BWD))


MIXED = {
    "fp16-with-fp32-bias": (torch.float16, torch.float32),
    "bf16-with-fp32-bias": (torch.bfloat16, torch.float32),
    "fp32-with-bf16-bias": (torch.float32, torch.bfloat16),
}


@two_kinds
@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_dtypes_may_differ(dtypes, kind, device):
    def cast(f):
        def call(x, bias):
            if x.dtype != torch.float64:  # the truth
                x, bias = x.to(dtypes[0]), bias.to(dtypes[1])
            return f(x, bias, kind)

        return call

    # of the narrower dtype, so that only what comes out is rounded
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    inputs = make(kind, 16, 120, dtype=narrow, device=device)
    assert cast(bias_act)(*inputs.values()).dtype == dtypes[0]
    assert_kernel_parity(cast(bias_act), cast(bias_act_ref), inputs, kernels=(FWD, BWD, SUM))


@all_kinds
def test_parity_catches_one_percent(kind, device):
    inputs = make(kind, 9, 40, device=device)
    assert_mutations_are_caught(of(kind), of(kind, bias_act_ref), inputs)


def test_gelu_by_erf_keeps_its_tail(device):
    """1 + erf(z / sqrt(2)) in fp32 has one digit left of it at -5 and none at -6."""
    z = torch.linspace(-8, -1, 200, device=device)[None]
    y, slope = forward_backward(of("gelu_erf"), [z], [torch.ones_like(z)])
    z = z.double()
    tail, bell = torch.special.erfc(z / -math.sqrt(2)) / 2, torch.exp(-(z**2) / 2)
    true = tail + z * bell / math.sqrt(2 * math.pi)
    torch.testing.assert_close(y.double(), z * tail, rtol=2e-2, atol=0)
    torch.testing.assert_close(slope.double(), true, rtol=1e-3, atol=1e-7)


# --- memory ---------------------------------------------------------------------------------------


@two_kinds
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_do_not_matter(layout, kind, device):
    x, bias = make(kind, 4, 5, 24, device=device).values()
    x, spread = layout(x), bias.repeat_interleave(2)[::2]
    with launches(FWD, BWD, SUM), guarded():
        got = forward_backward(of(kind), [x, spread])
    for a, b in zip(got, forward_backward(of(kind), [x.contiguous(), bias]), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("layout", [*LAYOUTS, "scalar"])
def test_strides_of_gradients_do_not_matter(layout, device):
    inputs = make("swiglu", 4, 5, 24, device=device).values()
    dy = awkward(4, 5, 24, device=device)
    # the scalar is what .sum() sends back
    dy = dy[0, 0, 0].expand(4, 5, 24) if layout == "scalar" else LAYOUTS[layout](dy)
    with launches(BWD), guarded():
        got = forward_backward(of("swiglu"), inputs, [dy])
    want = forward_backward(of("swiglu"), inputs, [dy.contiguous()])
    assert all(map(torch.equal, got, want))


@all_kinds
def test_numbers_beyond_the_last_row_and_column_are_let_alone(kind, device):
    """Beside NaN a kernel that went too far would write NaN, which the guards hold anyway."""
    x, bias = make(kind, 9, 43, device=device).values()
    inside = [x.contiguous()[:7], torch.cat((bias, bias))[: len(bias)]]
    dy = awkward(9, 43, device=device).contiguous()[:7]
    with launches(FWD, BWD, SUM), guarded():
        forward_backward(of(kind), inside, [dy])


@two_kinds
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_no_rows(shape, kind, device):
    with launches():
        y, dx, dbias = forward_backward(of(kind), make(kind, *shape, device=device).values())
    assert y.shape == shape
    assert dx.shape[:-1] == shape[:-1]
    assert (dbias == 0).all()


def test_offsets_beyond_int32(device):
    """Three rows 2**30 and more elements apart: memory is reserved, three pages of it are used."""

    def far(x):
        stride, N = (1 << 30) + 8, x.shape[-1]
        memory = torch.empty(2 * stride + N, dtype=x.dtype, device=device)
        return memory.as_strided((3, N), (stride, 1)).copy_(x)

    x, bias = make("swiglu", 3, 24, dtype=torch.float16, device=device).values()
    dy = awkward(3, 24, dtype=torch.float16, device=device)
    with launches(FWD, BWD):
        got = forward_backward(of("swiglu"), [far(x), bias], [far(dy)])
    assert all(map(torch.equal, got, forward_backward(of("swiglu"), [x, bias], [dy])))


# --- values ---------------------------------------------------------------------------------------


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
    """The exponentials overflow or vanish; torch in fp64 is the truth, as for all others."""
    x = 1e3 * make(kind, 9, 40, device=device)["x"]
    assert_kernel_parity(of(kind), of(kind, bias_act_ref), {"x": x}, kernels=(FWD, BWD))


def test_same_input_same_bits(device):
    inputs = make("swiglu", 50, 130, device=device)
    first = forward_backward(of("swiglu"), inputs.values())
    for _ in range(3 if device == "cpu" else 1000):
        assert all(map(torch.equal, first, forward_backward(of("swiglu"), inputs.values())))


# --- autograd -------------------------------------------------------------------------------------


def test_what_is_saved_is_what_came_in(device):
    x, bias = (t.requires_grad_() for t in make("swiglu", 9, 40, device=device).values())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_act(x, bias, "swiglu")
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), bias.data_ptr()]


@pytest.mark.parametrize("wanted", ["x", "bias"])
def test_gradients_of_some_inputs(wanted, device):
    inputs = make("swiglu", 5, 24, device=device)
    leaves = {k: x.clone().requires_grad_(k == wanted) for k, x in inputs.items()}
    every = {k: x.clone().requires_grad_() for k, x in inputs.items()}
    for tensors in (leaves, every):
        bias_act(**tensors, kind="swiglu").square().sum().backward()
    for k, x in leaves.items():
        assert torch.equal(x.grad, every[k].grad) if k == wanted else x.grad is None


def test_a_second_derivative_raises(device):
    x = awkward(3, 8, device=device).requires_grad_()
    y = bias_act(x, None, "relu_squared")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    dx, _ = torch.ops.fastgpt.bias_act_backward(dx.detach(), x, None, "relu_squared", None)
    with pytest.raises(NotImplementedError, match="no double backward"):
        dx.sum().backward()


@two_kinds
def test_autocast_sets_the_dtype_of_y_alone(kind, device):
    inputs = make(kind, 5, 24, device=device)
    with torch.autocast(device, torch.bfloat16), launches(FWD, BWD):
        y, dx, dbias = forward_backward(of(kind), inputs.values())
        plain = bias_act_ref(*inputs.values(), kind)
    assert (y.dtype, dx.dtype, dbias.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close(y, plain)


def test_checkpointing_gives_the_same_gradients(device):
    inputs = make("swiglu", 5, 24, device=device).values()

    def recomputed(x, bias):
        return checkpoint(bias_act, x, bias, "swiglu", use_reentrant=False)

    want = forward_backward(of("swiglu"), inputs)
    assert all(map(torch.equal, forward_backward(recomputed, inputs), want))


# --- torch.compile and torch.library --------------------------------------------------------------


@two_kinds
@pytest.mark.parametrize("with_bias", [True, False])
def test_opcheck(kind, with_bias, device):
    x, bias = make(kind, 2, 3, 24, device=device).values()
    permuted = x.mT.contiguous().mT.requires_grad_()
    bias = bias.requires_grad_() if with_bias else None
    opcheck(torch.ops.fastgpt.bias_act.default, (permuted, bias, kind, torch.float16))
    dy = awkward(2, 3, 24, device=device)
    plain = None if bias is None else bias.detach()
    dtype = torch.float16 if with_bias else None
    opcheck(torch.ops.fastgpt.bias_act_backward.default, (dy, x, plain, kind, dtype))


@two_kinds
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_to_one_node_and_never_again(kind, dynamic, device):
    shapes = ((2, 5, 24), (3, 5, 24), (4, 7, 24), (5, 9, 24))
    calls = [make(kind, *shape, device=device).values() for shape in shapes]
    assert_compiles_once(of(kind), calls, kernels=(FWD, BWD, SUM), dynamic=dynamic)


def test_fake_tensors_need_no_kernel(device):
    with launches(), FakeTensorMode():
        x = torch.empty(4, 5, 48, dtype=torch.bfloat16, device=device, requires_grad=True)
        bias = torch.empty(48, device=device, requires_grad=True)
        y = bias_act(x, bias, "swiglu")
        y.float().sum().backward()
    assert (y.shape, y.dtype) == ((4, 5, 24), x.dtype)
    assert (x.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.float32)


@all_kinds
def test_where_no_kernel_runs_the_reference_does(kind, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    inputs = make(kind, 5, 24).values()
    torch.compiler.reset()
    with launches():
        got = forward_backward(torch.compile(of(kind), fullgraph=True, backend="eager"), inputs)
        got_eager = forward_backward(of(kind), inputs)
    want = forward_backward(of(kind, bias_act_ref), inputs)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, got_eager, want))


# --- bad arguments --------------------------------------------------------------------------------

X = torch.ones(2, 8)
BAD = {
    "kind": ((X, None, "gelu"), r"kind: expected one of gelu_tanh, .*swiglu, got 'gelu'"),
    "dtype": ((X.double(), None, "relu"), r"x: expected fp32, fp16 or bf16, got torch.float64"),
    "scalar": ((torch.ones(()), None, "relu"), r"x: expected \(\.\.\., F\) .* got \(\)"),
    "no-columns": ((torch.ones(2, 0), None, "relu"), r"x: .* got \(2, 0\)"),
    "odd": ((X[:, :7], None, "swiglu"), r"x: expected \(\.\.\., 2F\) for swiglu, got \(2, 7\)"),
    "bias": ((X, torch.ones(4), "swiglu"), r"bias: expected \(8,\), got \(4,\)"),
    "bias-dtype": ((X, torch.ones(8).long(), "relu"), r"bias: expected fp32, .* got torch.int64"),
    "device": ((X, torch.ones(8, device="meta"), "relu"), r"bias: expected cpu as x, got meta"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(args, message):
    with launches(), pytest.raises(ValueError, match=message):
        bias_act(*args)
