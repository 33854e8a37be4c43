"""LayerNorm and RMSNorm as ops: strides, autograd, torch.compile, what is refused.

Numbers are those of tests/test_layer_norm.py.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastgpt.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm, runtime
from fastgpt.kernels.norm.op import add_layer_norm_ref
from tests.parity import assert_parity, awkward
from tests.proof import (
    LAYOUTS,
    assert_compiles_once,
    assert_kernel_parity,
    forward_backward,
    guarded,
    launches,
)
from tests.test_layer_norm import BWD, FWD, OPS, SUM, WIDE, all_ops, make

# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_do_not_matter(layout, device):
    inputs = make("add_layer_norm", 4, 5, 24, device=device)
    inputs["x"], inputs["residual"] = layout(inputs["x"]), layout(inputs["residual"])
    plain = [x.contiguous() for x in inputs.values()]
    with launches(FWD, BWD), guarded():
        got = forward_backward(add_layer_norm, inputs.values())
    for a, b in zip(got, forward_backward(add_layer_norm, plain), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def test_strides_of_weights_do_not_matter(device):
    inputs = list(make("layer_norm", 5, 24, device=device).values())
    spread = [inputs[0], *(x.repeat_interleave(2)[::2] for x in inputs[1:])]
    want = forward_backward(layer_norm, inputs)
    assert all(map(torch.equal, forward_backward(layer_norm, spread), want))


@pytest.mark.parametrize("layout", [*LAYOUTS, "scalar"])
def test_strides_of_gradients_do_not_matter(layout, device):
    inputs = make("add_layer_norm", 4, 5, 24, device=device)
    upstream = [awkward(4, 5, 24, device=device) for _ in range(2)]
    if layout == "scalar":  # what .sum() sends back
        upstream = [d[0, 0, 0].expand(4, 5, 24) for d in upstream]
    else:
        upstream = [LAYOUTS[layout](d) for d in upstream]
    with launches(BWD), guarded():
        got = forward_backward(add_layer_norm, inputs.values(), upstream)
    plain = [d.contiguous() for d in upstream]
    want = forward_backward(add_layer_norm, inputs.values(), plain)
    assert all(map(torch.equal, got, want))


@all_ops
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_no_rows(name, shape, device):
    op, _, _, outputs = OPS[name]
    with launches():
        got = forward_backward(op, make(name, *shape, device=device).values())
    assert all(y.shape == shape for y in got[:outputs])
    for d in got[outputs:]:
        assert d.shape == shape or (d == 0).all()


@pytest.mark.parametrize("N", [24, WIDE])
def test_offsets_beyond_int32(N, device):
    """Three rows 2**30 and more elements apart: memory is reserved, three pages of it are used."""

    def far(x):
        stride = (1 << 30) + 8
        y = torch.empty(2 * stride + N, dtype=x.dtype, device=device).as_strided(
            (3, N), (stride, 1)
        )
        return y.copy_(x)

    inputs = make("add_layer_norm", 3, N, dtype=torch.float16, device=device)
    upstream = [awkward(3, N, dtype=torch.float16, device=device) for _ in range(2)]
    x, residual, *vectors = inputs.values()
    with launches(FWD, BWD):
        got = forward_backward(
            add_layer_norm, [far(x), far(residual), *vectors], map(far, upstream)
        )
    want = forward_backward(add_layer_norm, inputs.values(), upstream)
    assert all(map(torch.equal, got, want))
    # alone, because after a sum the backward reads no x but the sum
    got = forward_backward(layer_norm, [far(x), *vectors], [far(upstream[0])])
    assert all(map(torch.equal, got, forward_backward(layer_norm, [x, *vectors], upstream[:1])))


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_may_be_unused(used, device):
    def one(f):
        return lambda *tensors: f(*tensors)[used]

    inputs = make("add_layer_norm", 5, 24, device=device)
    if used == 1:  # the weights have no part in the sum
        weight, bias = inputs.pop("weight"), inputs.pop("bias")
        add = one(lambda x, r: add_layer_norm(x, r, weight.requires_grad_(), bias))
        assert_parity(add, lambda x, r: x + r, inputs)
        return
    assert_kernel_parity(one(add_layer_norm), one(add_layer_norm_ref), inputs, kernels=(BWD, SUM))


@pytest.mark.parametrize(
    "wanted", [("x",), ("residual",), ("weight",), ("bias",), ("x", "bias")], ids="-".join
)
def test_gradients_of_some_inputs(wanted, device):
    inputs = make("add_layer_norm", 5, 24, device=device)
    leaves = {k: x.clone().requires_grad_(k in wanted) for k, x in inputs.items()}
    every = {k: x.clone().requires_grad_() for k, x in inputs.items()}
    for tensors in (leaves, every):
        y, total = add_layer_norm(*tensors.values())
        (y.square().sum() + total.square().sum()).backward()
    for k, x in leaves.items():
        assert torch.equal(x.grad, every[k].grad) if k in wanted else x.grad is None


def test_the_residuals_gradient_is_written_only_where_its_dtype_differs(device):
    def gradients(dtype):
        x, residual, weight = make("add_rms_norm", 5, 24, device=device).values()
        tensors = [x.to(dtype).requires_grad_(), residual.requires_grad_(), weight]
        y, total = add_rms_norm(*tensors)
        return torch.autograd.grad((y, total), tensors[:2], (y.detach(), total.detach()))

    dx, dresidual = gradients(torch.float32)
    assert dx.data_ptr() == dresidual.data_ptr()
    dx, dresidual = gradients(torch.float16)
    assert torch.equal(dresidual.half(), dx)
    assert not torch.equal(dresidual, dx.float())  # it was not rounded to x's dtype on the way


def test_a_second_derivative_raises(device):
    x = awkward(3, 8, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    args = (dx.detach(), None, x, torch.ones(1, 3, device=device), None, dx.dtype, None, None, None)
    dx = torch.ops.fastgpt.norm_backward(*args)[0]
    with pytest.raises(NotImplementedError, match="no double backward"):
        dx.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_sets_the_dtype_of_y_alone(dtype, device):
    if dtype == torch.float16 and device == "cpu":
        dtype = torch.bfloat16  # what the interpreter can do, and a CPU's default
    inputs = make("add_layer_norm", 5, 24, device=device)
    with torch.autocast(device, dtype), launches(FWD):
        y, total = add_layer_norm(*inputs.values())
        alone = layer_norm(total, inputs["weight"], inputs["bias"])
        plain, _ = add_layer_norm_ref(*inputs.values())
    assert (y.dtype, total.dtype, plain.dtype) == (dtype, torch.float32, dtype)
    assert torch.equal(alone, y)
    torch.testing.assert_close(y, plain)


def test_checkpointing_gives_the_same_gradients(device):
    inputs = make("add_layer_norm", 5, 24, device=device).values()

    def recomputed(*tensors):
        return checkpoint(add_layer_norm, *tensors, use_reentrant=False)

    want = forward_backward(add_layer_norm, inputs)
    assert all(map(torch.equal, forward_backward(recomputed, inputs), want))


# --- torch.compile and torch.library --------------------------------------------------------------


@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.float16], ids=str)
def test_opcheck(centred, residual, device):
    x = awkward(2, 3, 24, device=device).mT.contiguous().mT.requires_grad_()  # dense, permuted
    r = None if residual is None else awkward(2, 3, 24, dtype=residual, device=device)
    r = None if r is None else r.requires_grad_()
    w = awkward(24, device=device).requires_grad_()
    bias = awkward(24, device=device).requires_grad_() if centred else None
    opcheck(torch.ops.fastgpt.norm.default, (x, r, w, bias, 1e-5, centred, torch.float16))
    stats = torch.ones(2 if centred else 1, 6, device=device)
    dy, total = awkward(2, 3, 24, device=device), awkward(2, 3, 24, device=device)
    vectors = (torch.float32, torch.float32) if centred else (torch.float16, None)
    for dtotal, dresidual in ((None, None), (dy, torch.float16)):
        arguments = (dy, dtotal, total, stats, w.detach(), torch.float32, dresidual, *vectors)
        opcheck(torch.ops.fastgpt.norm_backward.default, arguments)


@all_ops
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_to_one_node_and_never_again(name, dynamic, device):
    op = OPS[name][0]
    shapes = ((2, 5, 24), (3, 5, 24), (4, 7, 24), (5, 9, 24))
    calls = [make(name, *shape, device=device).values() for shape in shapes]
    assert_compiles_once(op, calls, kernels=(FWD, BWD), dynamic=dynamic)


def test_dispatch_modes_see_the_op(device):
    """Selective checkpointing and FLOP counters are such modes."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = awkward(5, 24, device=device).requires_grad_()
    with Mode():
        y = rms_norm(x)
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert {"fastgpt.norm.default", "fastgpt.norm_backward.default"} <= set(seen)


def test_fake_tensors_need_no_kernel(device):
    with launches(), FakeTensorMode():
        x = torch.empty(4, 5, 24, dtype=torch.bfloat16, device=device, requires_grad=True)
        weight = torch.empty(24, device=device, requires_grad=True)
        y, total = add_rms_norm(x, x, weight)
        y.float().sum().backward()
    assert (y.shape, y.dtype, total.dtype) == (x.shape, x.dtype, x.dtype)
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


@all_ops
def test_where_no_kernel_runs_the_reference_does(name, monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    op, ref, _, _ = OPS[name]
    inputs = make(name, 5, 24).values()
    with launches():
        got = forward_backward(torch.compile(op, fullgraph=True, backend="eager"), inputs)
        got_eager = forward_backward(op, inputs)
    want = forward_backward(ref, inputs)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, got_eager, want))


# --- bad arguments --------------------------------------------------------------------------------

X = torch.ones(2, 8)
BAD = {
    "dtype": ((X.double(), None), r"x: expected fp32, fp16 or bf16, got torch.float64"),
    "scalar": ((torch.ones(()), None), r"x: expected \(\.\.\., N\) .* got \(\)"),
    "no-columns": ((torch.ones(2, 0), None), r"x: .* got \(2, 0\)"),
    "too-wide": ((torch.ones(1, 16_385), None), r"N from 1 to 16384, got \(1, 16385\)"),
    "weight": ((X, torch.ones(4)), r"weight: expected \(8,\), got \(4,\)"),
    "weight-dtype": ((X, torch.ones(8).long()), r"weight: expected fp32, .* got torch.int64"),
    "bias": ((X, None, torch.ones(1, 8)), r"bias: expected \(8,\), got \(1, 8\)"),
    "device": ((X, torch.ones(8, device="meta")), r"weight: expected cpu as x, got meta"),
    "eps": ((X, None, None, -1.0), r"eps: expected 0 or more, got -1.0"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(args, message):
    with launches(), pytest.raises(ValueError, match=message):
        layer_norm(*args)


def test_bad_residual_is_named():
    with launches(), pytest.raises(ValueError, match=r"residual: expected \(2, 8\), got \(8,\)"):
        add_rms_norm(X, torch.ones(8))
