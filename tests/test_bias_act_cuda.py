"""What only a GPU shows of bias and activation: `make parity` runs it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt.kernels import bias_act
from fastgpt.kernels.bias_act.op import ACTIVATIONS, bias_act_ref
from tests.cuda_proof import (
    assert_compiles_nothing_new,
    assert_nothing_waits,
    assert_on_the_current_stream,
    assert_replays,
    assert_same_bits,
    contiguous,
    need,
    one_at_a_time,
)
from tests.parity import assert_parity, awkward
from tests.proof import assert_kernel_parity, forward_backward, launches
from tests.test_bias_act import test_opcheck  # noqa: F401 - runs here on CUDA tensors

pytestmark = pytest.mark.gpu
FWD, BWD, SUM = "_bias_act_fwd_kernel", "_bias_act_bwd_kernel", "_norm_sum_kernel"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

all_kinds = pytest.mark.parametrize("kind", ACTIVATIONS)


def make(kind, M, N, dtype=torch.bfloat16):
    """Inputs that put out (M, N)."""
    N *= 2 if kind == "swiglu" else 1
    return {
        "x": awkward(M, N, dtype=dtype, device="cuda"),
        "bias": awkward(N, dtype=dtype, device="cuda"),
    }


def of(kind, f=bias_act):
    return lambda x, bias: f(x, bias, kind)


def repeated(kind, M, N):
    """(contiguous leaves, a step of them)."""
    leaves = [contiguous(x).requires_grad_() for x in make(kind, M, N).values()]
    dy = contiguous(awkward(M, N, dtype=torch.bfloat16, device="cuda"))

    def step():
        y = bias_act(*leaves, kind)
        return y, *torch.autograd.grad(y, leaves, dy)

    return leaves, step


def eager(kind):
    """PyTorch's own, on x + bias in the inputs' dtype."""
    return lambda x, bias: ACTIVATIONS[kind](x + bias)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@all_kinds
@pytest.mark.parametrize(
    ("M", "N"), [(16_384, 3072), (8192, 2048), (4096, 6400), (1001, 1365), (100_001, 64)], ids=str
)
def test_bias_act_matches_torch_at_real_shapes(kind, M, N, dtype):
    inputs = make(kind, M, N, dtype)
    assert_kernel_parity(
        of(kind), of(kind, bias_act_ref), inputs, eager=eager(kind), kernels=(FWD, BWD, SUM)
    )


@pytest.mark.parametrize("kind", ["gelu_tanh", "swiglu"])
def test_bf16_activations_with_fp32_bias(kind):
    def mixed(f):
        def call(x, bias):
            return f(x, bias if x.dtype == torch.float64 else bias.float(), kind)

        return call

    assert_parity(mixed(bias_act), mixed(bias_act_ref), make(kind, 16_384, 768))


@all_kinds
def test_a_thousand_steps_give_the_same_bits(kind):
    assert_same_bits(repeated(kind, 4096, 3072)[1])


@all_kinds
def test_nothing_waits_for_the_device(kind):
    assert_nothing_waits(repeated(kind, 4096, 3072)[1], FWD, BWD, SUM)


@pytest.mark.parametrize("kind", ["gelu_tanh", "swiglu"])
def test_a_captured_graph_replays_with_new_inputs(kind):
    leaves, step = repeated(kind, 1024, 3072)
    assert_replays(step, leaves)


def test_kernels_run_on_the_current_stream():
    leaves, step = repeated("swiglu", 16_384, 2048)
    assert_on_the_current_stream(step, leaves[0])


@one_at_a_time
def test_more_than_two_billion_elements():
    N = 1024
    M = 2**31 // N + 1000
    need(40)
    x = torch.empty(M, 2 * N, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    bias = awkward(2 * N, device="cuda").requires_grad_()
    tail = slice(M - 1000, M)  # every element of it lies beyond 2**31, in x and in y
    dy = torch.zeros(M, N, dtype=torch.bfloat16, device="cuda")
    dy[tail] = awkward(1000, N, dtype=torch.bfloat16, device="cuda")
    y = bias_act(x, bias, "swiglu")
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    last = x.detach()[tail].clone().requires_grad_()
    y_last = bias_act(last, bias, "swiglu")
    dlast, dbias_last = torch.autograd.grad(y_last, (last, bias), dy[tail])
    assert torch.equal(y[tail], y_last)
    assert torch.equal(dx[tail], dlast)
    assert (dx[:-1000] == 0).all()
    torch.testing.assert_close(dbias, dbias_last, rtol=1e-4, atol=1e-4)  # by other programs


def test_a_new_number_of_rows_compiles_nothing():
    from fastgpt.kernels.bias_act import device as bias_act_kernels

    def run(M):
        repeated("swiglu", M, 96)[1]()

    sizes = (1, 3, 16, 17, 1000, 4096, 65_536)
    assert_compiles_nothing_new(bias_act_kernels, (FWD, BWD), run, sizes)


@all_kinds
def test_compiled_by_inductor_is_the_same(kind):
    """Between two projections, in bf16 autocast, as in a model."""
    torch.compiler.reset()
    wide = 2 if kind == "swiglu" else 1
    up, down = awkward(wide * 512, 128, device="cuda"), awkward(128, 512, device="cuda")

    def op(x, bias):
        with torch.autocast("cuda", torch.bfloat16):
            return F.linear(bias_act(F.linear(x, up), bias, kind), down)

    compiled = torch.compile(op, fullgraph=True)
    for M in (127, 193, 256):
        inputs = [awkward(M, 128, device="cuda").contiguous(), awkward(wide * 512, device="cuda")]
        dy = [awkward(M, 128, dtype=torch.bfloat16, device="cuda")]
        with launches(FWD, BWD):
            got = forward_backward(compiled, inputs, dy)
        want = forward_backward(op, inputs, dy)
        for a, b in zip(got, want, strict=True):  # Inductor may choose another product
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
