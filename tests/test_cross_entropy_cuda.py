"""What only a GPU shows of the two losses: `make parity` runs it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt.kernels import cross_entropy, linear_cross_entropy
from fastgpt.kernels.cross_entropy.linear import linear_cross_entropy_ref
from fastgpt.kernels.cross_entropy.op import cross_entropy_ref
from tests.cuda_proof import (
    assert_compiles_nothing_new,
    assert_nothing_waits,
    assert_on_the_current_stream,
    assert_replays,
    assert_same_bits,
    need,
    one_at_a_time,
)
from tests.parity import assert_parity, awkward
from tests.proof import launches
from tests.test_cross_entropy import test_opcheck  # noqa: F401 - runs here on CUDA tensors
from tests.test_linear_cross_entropy import test_opcheck as test_opcheck_linear  # noqa: F401

pytestmark = pytest.mark.gpu
FWD, BWD = "_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel"
SCALE = "_cross_entropy_scale_kernel"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EVERY = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}
V, VALID = 50_304, 50_257

all_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def make(M, V=V, valid=VALID, dtype=torch.bfloat16):
    """Contiguous logits, as a head gives them, and targets, of which every third is ignored."""
    logits = 3 * awkward(M, V, device="cuda").contiguous()
    targets = torch.randint(valid, (M,), device="cuda")
    targets[1::3] = -100
    return logits.to(dtype), targets


def head(M, C=768, dtype=torch.bfloat16):
    x = awkward(M, C, device="cuda").contiguous().to(dtype)
    weight = 0.02 * torch.randn(V, C, device="cuda")
    targets = torch.randint(VALID, (M,), device="cuda")
    targets[1::3] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


def over_the_logits(logits, targets, **options):
    return cross_entropy(logits.clone(), targets, **options, inplace_grad=True)


def linear_step(x, weight, targets, **options):
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, valid_vocab=VALID, **options)
    return loss, *torch.autograd.grad(loss, (x, weight))


def step(logits, targets, **options):
    """Loss and gradient; with `inplace_grad` the logits are overwritten."""
    loss = cross_entropy(logits, targets, valid_vocab=VALID, **options)
    return loss, *torch.autograd.grad(loss, logits)


@all_dtypes
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "every-option"])
@pytest.mark.parametrize("op", [cross_entropy, over_the_logits], ids=["apart", "in-place"])
def test_cross_entropy_matches_torch_at_real_shapes(op, options, dtype):
    logits, targets = make(512, dtype=dtype)
    for reduction in ("mean", "none"):
        with launches(FWD):
            assert_parity(
                op,
                cross_entropy_ref,
                {"logits": logits, "targets": targets},
                valid_vocab=VALID,
                reduction=reduction,
                **options,
            )


@all_dtypes
@pytest.mark.parametrize("V", [256, 2048, 50_257, 128_256])
def test_cross_entropy_matches_torch_at_other_widths(V, dtype):
    logits, targets = make(64, V, V, dtype)
    for op in (cross_entropy, over_the_logits):
        assert_parity(op, cross_entropy_ref, {"logits": logits, "targets": targets})


@all_dtypes
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunk", [None, 200])
def test_linear_cross_entropy_matches_torch_at_real_shapes(chunk, reduction, dtype):
    x, weight, targets = head(512, dtype=dtype)
    inputs = {"x": x, "weight": weight.to(dtype), "targets": targets}
    with launches(FWD):
        assert_parity(
            linear_cross_entropy,
            linear_cross_entropy_ref,
            inputs,
            valid_vocab=VALID,
            reduction=reduction,
            chunk_tokens=chunk,
        )


def test_the_weights_gradient_adds_up_in_fp32():
    """Under autocast, of 16 chunks: no worse than one product of all tokens, which bf16 rounds."""
    x, weight, targets = head(4096)
    got = linear_step(x, weight, targets, chunk_tokens=256)[2]
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(F.linear(x, weight)[:, :VALID].float(), targets)
    (eager,) = torch.autograd.grad(loss, weight)
    true = weight.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(x.detach().double(), true)[:, :VALID], targets)
    (truth,) = torch.autograd.grad(loss, true)
    assert got.dtype == torch.float32
    assert (got - truth).norm() <= (eager - truth).norm()


def test_a_thousand_steps_give_the_same_bits():
    inputs = head(1024)
    assert_same_bits(lambda: linear_step(*inputs, chunk_tokens=256))


def test_nothing_waits_for_the_device():
    x, weight, targets = head(1024)
    logits, _ = make(1024)
    logits.requires_grad_()

    def every():
        linear_step(x, weight, targets, chunk_tokens=256)
        linear_step(x, weight, targets, chunk_tokens=256, reduction="sum")
        step(logits, targets)
        step(logits * 1, targets)
        y = logits * 1
        loss = cross_entropy(y, targets, valid_vocab=VALID, inplace_grad=True)
        torch.autograd.grad(loss, logits)

    assert_nothing_waits(every, FWD, BWD, SCALE)


def test_a_captured_graph_replays_with_new_inputs():
    x, weight, targets = head(1024)

    def fewer():
        targets[::5] = -100

    assert_replays(lambda: linear_step(x, weight, targets, chunk_tokens=256), [x], fewer)


def test_kernels_run_on_the_current_stream():
    x, weight, targets = head(1024)
    assert_on_the_current_stream(lambda: linear_step(x, weight, targets), x)


@one_at_a_time
def test_more_than_two_billion_elements():
    M = 2**31 // V + 600
    need(20)
    logits = torch.empty(M, V, dtype=torch.bfloat16, device="cuda").normal_()
    targets = torch.randint(VALID, (M,), device="cuda")
    tail = slice(M - 500, M)  # every element of it lies beyond 2**31
    last, last_targets = logits[tail].clone().requires_grad_(), targets[tail]
    want = cross_entropy(last, last_targets, valid_vocab=VALID, reduction="none")
    (dlast,) = torch.autograd.grad(want.sum(), last)
    for inplace in (False, True):
        leaf = logits.detach().requires_grad_()
        reduction = "sum" if inplace else "none"
        loss = cross_entropy(
            leaf, targets, valid_vocab=VALID, reduction=reduction, inplace_grad=inplace
        )
        if not inplace:
            assert torch.equal(loss[tail], want)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(gradient[tail], dlast, rtol=0.01, atol=1e-6)
        del gradient


def test_peak_memory_is_a_chunk_and_the_gradients():
    """GPT-2's head at 16,384 tokens: 0.41 GB of logits instead of 1.6, and their fp32 copies."""
    x, weight, targets = head(16_384)
    linear_step(x, weight, targets)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_step(x, weight, targets)
    assert torch.cuda.max_memory_allocated() - before < 0.9e9


def test_a_new_number_of_rows_compiles_nothing():
    from fastgpt.kernels.cross_entropy import device as cross_entropy_kernels

    def run(M):
        logits, targets = make(M, 96, 90)
        for inplace in (False, True):
            leaf = logits.clone().requires_grad_()
            cross_entropy(leaf, targets, valid_vocab=90, inplace_grad=inplace).backward()

    sizes = (1, 3, 16, 17, 1000, 4096, 65_536)
    assert_compiles_nothing_new(cross_entropy_kernels, (FWD, BWD, SCALE), run, sizes)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_by_inductor_is_the_same(reduction):
    """With ignored rows, whose number differs from call to call."""
    torch.compiler.reset()

    def op(x, weight, targets):
        with torch.autocast("cuda", torch.bfloat16):
            return linear_cross_entropy(
                x, weight, targets, valid_vocab=VALID, chunk_tokens=100, reduction=reduction
            )

    compiled = torch.compile(op, fullgraph=True)
    for M in (127, 193, 256):
        x, weight, targets = head(M)
        with launches(FWD):
            got, want = compiled(x, weight, targets), op(x, weight, targets)
            grads = (torch.autograd.grad(y.sum(), (x, weight)) for y in (got, want))
            assert torch.equal(got, want)
            assert all(map(torch.equal, *grads))
