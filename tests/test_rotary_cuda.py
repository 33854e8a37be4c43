"""What only a GPU shows of rotary positions: `make parity` runs it."""

import pytest
import torch

from fastgpt.kernels import rotary, rotary_ref
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
from tests.parity import awkward
from tests.proof import assert_kernel_parity, forward_backward, launches
from tests.test_rotary import test_opcheck  # noqa: F401 - runs here on CUDA tensors

pytestmark = pytest.mark.gpu
KERNEL = "_rotary_kernel"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

both_conventions = pytest.mark.parametrize(
    "interleaved", [False, True], ids=["halves", "interleaved"]
)


def angles(T, D):
    at = awkward(T, D // 2, device="cuda").contiguous()
    return at.cos(), at.sin()


def repeated(B, T, H, K, D, **options):
    """(a packed projection, a step through it)."""
    qkv = contiguous(awkward(B, T, H + 2 * K, D, device="cuda").to(torch.bfloat16))
    qkv.requires_grad_()
    where = angles(T, D)
    upstream = [contiguous(awkward(B, T, n, D, device="cuda").to(qkv)) for n in (H, K)]

    def step():
        source = qkv * 1
        turned = rotary(source[:, :, :H], source[:, :, H : H + K], *where, **options)
        return *turned, *torch.autograd.grad(turned, qkv, upstream)

    return qkv, step


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@both_conventions
@pytest.mark.parametrize(
    "shape",
    [(16, 1024, 12, 12, 64), (2, 4096, 16, 4, 128), (1, 1001, 25, 5, 64), (3, 65, 3, 1, 80),
     (2, 200, 8, 8, 256)],
    ids=str,
)  # fmt: skip
def test_rotary_matches_torch_at_real_shapes(shape, interleaved, dtype):
    B, T, H, K, D = shape
    where = angles(T, D)

    def of(f):
        return lambda q, k: f(q, k, *where, interleaved=interleaved)

    inputs = {
        name: awkward(B, T, heads, D, dtype=dtype, device="cuda")
        for name, heads in (("q", H), ("k", K))
    }
    assert_kernel_parity(of(rotary), of(rotary_ref), inputs, kernels=(KERNEL,))


@both_conventions
@pytest.mark.parametrize("shape", [(16, 1024, 12, 12, 64), (3, 65, 3, 1, 80)], ids=str)
def test_in_place_is_what_it_is_elsewhere(shape, interleaved):
    """A block that read what another thread had written would turn it twice."""
    torch.manual_seed(1)
    _, apart = repeated(*shape, interleaved=interleaved)
    torch.manual_seed(1)
    _, over = repeated(*shape, interleaved=interleaved, inplace=True)
    want = apart()
    for _ in range(100):
        assert all(map(torch.equal, over(), want))


@both_conventions
def test_a_thousand_steps_give_the_same_bits(interleaved):
    assert_same_bits(repeated(4, 1024, 12, 12, 64, interleaved=interleaved)[1])


@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_waits_for_the_device(inplace):
    assert_nothing_waits(repeated(4, 1024, 12, 12, 64, inplace=inplace)[1], KERNEL)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_captured_graph_replays_with_new_inputs(inplace):
    qkv, step = repeated(2, 1024, 12, 12, 64, inplace=inplace)
    assert_replays(step, [qkv])


def test_kernels_run_on_the_current_stream():
    qkv, step = repeated(16, 1024, 12, 12, 64)
    assert_on_the_current_stream(step, qkv)


@one_at_a_time
def test_more_than_two_billion_elements():
    B, T, H, D = 36, 65_536, 15, 64
    need(30)
    qk = torch.empty(B, T, H + 1, D, dtype=torch.bfloat16, device="cuda").normal_()
    where = angles(T, D)
    last = qk[-1:].clone()  # every element of it lies beyond 2**31
    want = rotary(last[:, :, :H], last[:, :, H:], *where)
    for inplace in (False, True):
        got = rotary(qk[:, :, :H], qk[:, :, H:], *where, inplace=inplace)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[-1:], b)


def test_a_new_number_of_tokens_compiles_nothing():
    from fastgpt.kernels.rotary import device as rotary_kernels

    def run(T):
        repeated(T % 5 + 1, T, 6, 2, 64)[1]()

    assert_compiles_nothing_new(rotary_kernels, (KERNEL,), run, (1, 3, 16, 17, 1000, 4096))


@both_conventions
def test_compiled_by_inductor_is_the_same(interleaved):
    torch.compiler.reset()
    table = angles(300, 64)

    def op(qkv):
        q, k, v = qkv.split((6, 2, 2), dim=2)
        where = (x[: qkv.shape[1]] for x in table)
        return *rotary(q, k, *where, interleaved=interleaved), v * 1

    compiled = torch.compile(op, fullgraph=True)
    for B, T in ((2, 127), (3, 193), (4, 256)):
        inputs = [awkward(B, T, 10, 64, device="cuda").to(torch.bfloat16).contiguous()]
        with launches(KERNEL):
            got = forward_backward(compiled, inputs)
        assert all(map(torch.equal, got, forward_backward(op, inputs)))
