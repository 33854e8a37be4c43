"""Tests of attention on a GPU; `test_conformance` has those of every op."""

import pytest
import torch

from fastgpt.kernels import attention, attention_dropout_mask
from fastgpt.kernels.attention.plain import attention_ref
from fastgpt.kernels.attention.spec import ATTENTION, DKV, DQ, FWD, options, problem
from tests.kernels import conformance
from tests.kernels.cuda.proof import assert_nothing_waits, captured, need, one_at_a_time
from tests.parity import forward_backward

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Tiles of every head dimension at lengths that fill a GPU, and the masks that change a tile.
REAL = {
    "odd-length": problem(3, 1000, 12, 64),
    "d128-grouped": problem(2, 2048, 16, 128, K=4),
    "d256": problem(1, 1024, 8, 256),
    "d32": problem(4, 1024, 8, 32),
    "d16": problem(4, 1024, 8, 16),
    "d80": problem(2, 512, 8, 80),
    "d96": problem(2, 512, 8, 96),
}
MASKS = {"window": 256}, {"window": 100, "docs": 300}, {"docs": 300, "causal": False}
REAL |= {f"{name}-full": {**s, "causal": False} for name, s in REAL.items()}
REAL |= {f"d{D} {m}": problem(4, 1024, 6, D, K=2, **m) for D in (64, 128) for m in MASKS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REAL)
def test_errors_at_real_shapes(name, dtype):
    conformance.parity(ATTENTION, REAL[name], "cuda", DTYPES[dtype])


def test_the_mask_is_that_of_the_cpu():
    mask = attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1)
    assert torch.equal(mask, attention_dropout_mask((2, 3, 100, 90), 0.3, 2**40 + 1, "cuda").cpu())


@one_at_a_time
def test_more_than_2_to_the_31_elements():
    need(44)
    T, H, D = 1 << 20, 33, 64  # 2.2e9 elements in each tensor; the window keeps it quick
    one = [torch.randn(1, T, 1, D, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    many = [x.expand(1, T, H, D).contiguous() for x in one]
    upstream = torch.linspace(-1, 1, T, device="cuda", dtype=torch.bfloat16)[:, None, None]

    def run(inputs):
        shape = inputs[0].shape
        return forward_backward(
            lambda *x: attention(*x, window=64), inputs, [upstream.expand(shape)]
        )

    single = run(one)
    for a, b in zip(single, run(many), strict=True):
        for h in (0, H - 1):
            assert torch.equal(b[:, :, h], a[:, :, 0])
    last = attention_ref(*(x[:, -128:] for x in one), window=64)[:, -64:]
    torch.testing.assert_close(single[0][:, -64:], last, rtol=2e-2, atol=2e-2)


def gpt2():
    return [torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]


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
