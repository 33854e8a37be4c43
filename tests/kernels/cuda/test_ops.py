"""Promises of single ops on a GPU; `test_conformance` has those of every op."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt.kernels import (
    attention,
    attention_dropout_mask,
    decode_attention,
    linear_cross_entropy,
)
from fastgpt.kernels.attention.spec import DKV, DQ, FWD, options, problem
from fastgpt.kernels.decode_attention.spec import DECODE_ATTENTION
from fastgpt.kernels.decode_attention.spec import problem as decode_problem
from fastgpt.kernels.linear.op import linear
from tests.conftest import SIMULATED
from tests.kernels import conformance
from tests.kernels.cuda.proof import assert_nothing_waits, captured
from tests.parity import awkward

pytestmark = pytest.mark.gpu


def test_the_mask_is_that_of_the_cpu():
    mask = attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1)
    assert torch.equal(mask, attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1, "cuda").cpu())


def gpt2():
    return [torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_autocast_does_not_round_the_gradients_of_weights(dtype, bias):
    x, dy = (torch.randn(4, 32, n, device="cuda") for n in (48, 80))
    weight, offset = (torch.randn(size, device="cuda") for size in ((80, 48), (80,)))
    inputs = [t.requires_grad_() for t in ((x, weight, offset) if bias else (x, weight))]
    with torch.autocast("cuda", dtype):
        y = linear(*inputs)
        plain = F.linear(*inputs)
    assert torch.equal(y, plain)
    assert y.dtype == dtype
    y.backward(dy.to(dtype))
    rounded, upstream = (t.detach().to(dtype).double() for t in (x, dy))
    rows, upstream = rounded.flatten(0, 1), upstream.flatten(0, 1)
    of_x = (upstream @ weight.detach().to(dtype).double()).to(dtype).view_as(x)
    for t, gradient in zip(inputs, (of_x, upstream.T @ rows, upstream.sum(0))):
        assert t.grad.dtype == torch.float32
        bound = 2e-2 if t is x else 1e-4  # of x it is rounded, as ever
        torch.testing.assert_close(t.grad.double(), gradient.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_and_documents_wait_for_nothing(seed):
    inputs = [x.requires_grad_() for x in gpt2()]
    more = options(problem(2, 256, 4, 64, docs=100), "cuda") | {"dropout_seed": seed}

    def step():
        out = attention(*inputs, dropout_p=0.1, **more)
        return torch.autograd.grad(out, inputs, out.detach())

    assert_nothing_waits(step, FWD, DQ, DKV)


def test_each_replay_draws_its_own_mask():
    inputs = gpt2()
    graph, (out,) = captured(lambda: [attention(*inputs, dropout_p=0.3)])
    masked = []
    for _ in range(2):
        graph.replay()
        masked.append(out.clone())
    assert not torch.equal(*masked)


def test_a_captured_graph_of_decode_attention_serves_other_lengths():
    s = decode_problem(2048, 8, 64, (2048,) * 3, K=2)
    inputs = conformance.make_inputs(DECODE_ATTENTION, s, "cuda", torch.bfloat16).values()
    *_, lengths = inputs
    graph, (out,) = captured(lambda: [decode_attention(*inputs)])
    for new in ([2048, 1, 0], [5, 700, 2047]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(out, decode_attention(*inputs))


@pytest.mark.skipif(SIMULATED, reason="products of GPT-2's head take hours on a simulated GPU")
def test_peak_memory_of_the_head_is_a_chunk_and_the_gradients():
    """GPT-2's head at 16,384 tokens, every third target ignored."""
    V, valid = 50_304, 50_257
    x = awkward(16_384, 768, device="cuda").contiguous().bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(V, 768, device="cuda")).requires_grad_()
    targets = torch.randint(valid, (16_384,), device="cuda")
    targets[1::3] = -100
    for _ in range(2):  # the first call compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets, valid_vocab=valid)
        torch.autograd.grad(loss, (x, weight))
    assert torch.cuda.max_memory_allocated() - before < 0.9e9
