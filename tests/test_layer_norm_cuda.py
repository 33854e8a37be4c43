"""What only a GPU shows of LayerNorm and RMSNorm: `make parity` runs it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fastgpt.kernels.norm.op import (
    add_layer_norm_ref,
    add_rms_norm_ref,
    layer_norm_ref,
    rms_norm_ref,
)
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
from tests.proof import assert_kernel_parity, launches
from tests.test_layer_norm_op import test_opcheck  # noqa: F401 - runs here on CUDA tensors

pytestmark = pytest.mark.gpu
FWD, BWD, SUM = "_norm_fwd_kernel", "_norm_bwd_kernel", "_norm_sum_kernel"


def eager_add_layer_norm(x, residual, weight, bias):
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias), total


def eager_add_rms_norm(x, residual, weight):
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-6), total


# op -> (itself, its reference, PyTorch's own, its inputs)
OPS = {
    "layer_norm": (
        layer_norm,
        layer_norm_ref,
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        ("x", "weight", "bias"),
    ),
    "add_layer_norm": (
        add_layer_norm,
        add_layer_norm_ref,
        eager_add_layer_norm,
        ("x", "residual", "weight", "bias"),
    ),
    "rms_norm": (
        rms_norm,
        rms_norm_ref,
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
        ("x", "weight"),
    ),
    "add_rms_norm": (
        add_rms_norm,
        add_rms_norm_ref,
        eager_add_rms_norm,
        ("x", "residual", "weight"),
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make(name, M, N, dtype):
    return {
        key: awkward(*((M, N) if key in ("x", "residual") else (N,)), dtype=dtype, device="cuda")
        for key in OPS[name][3]
    }


def leaves(name, M, N, dtype=torch.bfloat16):
    return [contiguous(x).requires_grad_() for x in make(name, M, N, dtype).values()]


def step(tensors, upstream):
    """Outputs and gradients of `add_layer_norm`."""
    ys = add_layer_norm(*tensors)
    return [*ys, *torch.autograd.grad(ys, tensors, upstream)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("M", "N"), [(16_384, 768), (4096, 1600), (1024, 8192), (512, 16_384), (100_001, 64)], ids=str
)
def test_norm_matches_torch_at_real_shapes(name, M, N, dtype):
    op, ref, eager, _ = OPS[name]
    inputs = make(name, M, N, dtype)
    assert_kernel_parity(op, ref, inputs, eager=eager, kernels=(FWD, BWD, SUM))


@pytest.mark.parametrize("N", [768, 1600])
def test_bf16_activations_with_fp32_weights(N):
    def mixed(f):
        def of(x, residual, weight, bias):
            if x.dtype == torch.float64:  # the truth
                return f(x, residual, weight, bias)
            return f(x, residual, weight.float(), bias.float())

        return of

    inputs = make("add_layer_norm", 16_384, N, torch.bfloat16)
    assert_parity(mixed(add_layer_norm), mixed(add_layer_norm_ref), inputs)


def repeated(M, N):
    """(its inputs, a step of `add_layer_norm`)."""
    tensors = leaves("add_layer_norm", M, N)
    upstream = [awkward(M, N, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    return tensors, lambda: step(tensors, upstream)


def test_a_thousand_steps_give_the_same_bits():
    assert_same_bits(repeated(16_384, 768)[1])


def test_nothing_waits_for_the_device():
    assert_nothing_waits(repeated(16_384, 768)[1], FWD, BWD, SUM)


def test_a_captured_graph_replays_with_new_inputs():
    tensors, again = repeated(1024, 768)
    assert_replays(again, tensors)


def test_kernels_run_on_the_current_stream():
    tensors, again = repeated(16_384, 768)
    assert_on_the_current_stream(again, tensors[0])


@one_at_a_time
def test_more_than_two_billion_elements():
    N = 768
    M = 2**31 // N + 1000
    need(40)
    x = torch.empty(M, N, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    weight, bias = (awkward(N, device="cuda").requires_grad_() for _ in range(2))
    tail = slice(M - 1000, M)  # every element of it lies beyond 2**31
    dy = torch.zeros(M, N, dtype=torch.bfloat16, device="cuda")
    dy[tail] = awkward(1000, N, dtype=torch.bfloat16, device="cuda")
    y = layer_norm(x, weight, bias)
    got = torch.autograd.grad(y, (x, weight, bias), dy)
    last = x.detach()[tail].clone().requires_grad_()
    y_last = layer_norm(last, weight, bias)
    want = torch.autograd.grad(y_last, (last, weight, bias), dy[tail])
    assert torch.equal(y[tail], y_last)
    assert torch.equal(got[0][tail], want[0])
    assert (got[0][:-1000] == 0).all()
    for a, b in zip(got[1:], want[1:], strict=True):  # summed over other programs
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_new_number_of_rows_compiles_nothing():
    from fastgpt.kernels.norm import device as norm_kernels

    def run(M):
        tensors = leaves("add_layer_norm", M, 96)
        step(tensors, [torch.ones_like(tensors[0])] * 2)

    sizes = (1, 3, 16, 17, 1000, 4096, 65_536)
    assert_compiles_nothing_new(norm_kernels, (FWD, BWD, SUM), run, sizes)


@pytest.mark.parametrize("name", OPS)
def test_compiled_by_inductor_is_the_same(name):
    op = OPS[name][0]
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True)
    for M in (127, 193, 256):
        tensors = leaves(name, M, 768)
        with launches(FWD, BWD):
            got, want = compiled(*tensors), op(*tensors)
            got, want = ((ys,) if isinstance(ys, torch.Tensor) else ys for ys in (got, want))
            upstream = [torch.ones_like(y) for y in want]
            got = [*got, *torch.autograd.grad(got, tensors, upstream)]
            want = [*want, *torch.autograd.grad(want, tensors, upstream)]
        assert all(map(torch.equal, got, want))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_its_tensors():
    tensors = [x.detach().to("cuda:1").requires_grad_() for x in leaves("add_layer_norm", 64, 96)]
    upstream = [torch.ones_like(tensors[0])] * 2
    got = step(tensors, upstream)
    with torch.cuda.device(1):
        assert all(map(torch.equal, got, step(tensors, upstream)))
