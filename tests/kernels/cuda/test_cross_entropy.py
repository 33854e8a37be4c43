"""Tests of the two losses on a GPU; `test_conformance` has those of every op."""

import pytest
import torch

from fastgpt.kernels import cross_entropy, linear_cross_entropy
from tests.kernels import conformance
from tests.kernels.cuda.proof import need, one_at_a_time
from tests.kernels.test_cross_entropy import SPECS
from tests.parity import awkward

pytestmark = pytest.mark.gpu
V, VALID = 50_304, 50_257
PADDED = {"M": 512, "V": V, "valid_vocab": VALID, "ignored": True}


def head(M, C=768):
    """Makes x in autocast's dtype, a weight, and targets of which every third is ignored."""
    x = awkward(M, C, device="cuda").contiguous().bfloat16()
    weight = 0.02 * torch.randn(V, C, device="cuda")
    targets = torch.randint(VALID, (M,), device="cuda")
    targets[1::3] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


def linear_step(x, weight, targets, **options):
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, valid_vocab=VALID, **options)
    return loss, *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cross_entropy", {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}),
        ("cross_entropy", {"inplace_grad": True}),
        ("linear_cross_entropy", {"C": 64}),
        ("linear_cross_entropy", {"C": 64, "chunk_tokens": 200}),
    ],
)
def test_parity_at_gpt2s_padded_vocabulary(name, options, reduction, dtype):
    problem = {**PADDED, **options, "reduction": reduction}
    conformance.parity(SPECS[name], problem, "cuda", dtype)


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
    """Peak memory of GPT-2's head at 16,384 tokens is that of one chunk and the gradients."""
    x, weight, targets = head(16_384)
    linear_step(x, weight, targets)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_step(x, weight, targets)
    assert torch.cuda.max_memory_allocated() - before < 0.9e9
