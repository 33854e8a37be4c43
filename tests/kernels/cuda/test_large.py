"""Tensors of more than 2**31 elements, whose offsets pass 32 bits, for each op on a GPU."""

from functools import partial

import pytest
import torch

from fastgpt.kernels import attention, bias_act, cross_entropy, layer_norm, rotary
from fastgpt.kernels import decode_attention as decode
from fastgpt.kernels.attention.plain import attention_ref
from fastgpt.kernels.rotary.spec import ROTARY
from tests.kernels.cuda.proof import need
from tests.parity import awkward, forward_backward

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("memory")]  # one worker runs them all
V, VALID = 50_304, 50_257


@pytest.mark.parametrize(
    ("op", "columns", "of_output", "vectors"),
    [
        (layer_norm, 768, 768, (768, 768)),
        (lambda *x: bias_act(*x, "swiglu"), 2048, 1024, (2048,)),
    ],
    ids=["layer_norm", "bias_act"],
)
def test_rows(op, columns, of_output, vectors):
    """Rows beyond 2**31 elements, of input and output, give what they give alone."""
    need(40)
    vectors = [awkward(n, device="cuda") for n in vectors]
    M = 2**31 // of_output + 1000
    x = torch.empty(M, columns, dtype=torch.bfloat16, device="cuda").normal_()
    dy = torch.zeros(M, of_output, dtype=torch.bfloat16, device="cuda")
    dy[-1000:] = awkward(1000, of_output, dtype=torch.bfloat16, device="cuda")
    y, dx, *sums = forward_backward(op, [x, *vectors], [dy])
    want_y, want_dx, *want_sums = forward_backward(op, [x[-1000:].clone(), *vectors], [dy[-1000:]])
    assert torch.equal(y[-1000:], want_y)
    assert torch.equal(dx[-1000:], want_dx)
    assert (dx[:-1000] == 0).all()
    torch.testing.assert_close(sums, want_sums, rtol=1e-4, atol=1e-4)  # by other programs


def test_attention():
    need(44)
    T, H, D = 1 << 20, 33, 64  # 2.2e9 elements in each tensor; the window keeps it quick
    one = [torch.randn(1, T, 1, D, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    many = [x.expand(1, T, H, D).contiguous() for x in one]
    upstream = torch.linspace(-1, 1, T, device="cuda", dtype=torch.bfloat16)[:, None, None]

    def run(inputs):
        op = partial(attention, window=64)
        return forward_backward(op, inputs, [upstream.expand(inputs[0].shape)])

    single = run(one)
    for a, b in zip(single, run(many), strict=True):
        for h in (0, H - 1):
            assert torch.equal(b[:, :, h], a[:, :, 0])
    last = attention_ref(*(x[:, -128:] for x in one), window=64)[:, -64:]
    torch.testing.assert_close(single[0][:, -64:], last, rtol=2e-2, atol=2e-2)


def test_decode_attention():
    B, Tmax, D = 2, 1 << 24, 128  # 2**32 elements in each cache
    need(24)
    k, v = (torch.zeros(B, Tmax, 1, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(B, 1, 2, D, device="cuda", dtype=torch.bfloat16)
    tail = slice(Tmax - 300, Tmax)
    for x in (k, v):
        x[:, tail] = torch.randn(B, 300, 1, D, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((B,), Tmax, device="cuda")
    starts = lengths[:, None] - 300
    expected = decode(q, k[:, tail], v[:, tail], lengths * 0 + 300)
    got = decode(q, k, v, lengths, starts=starts)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    table = torch.arange(B * Tmax // 64, device="cuda", dtype=torch.int32).view(B, -1)
    pages = (x.view(-1, 64, 1, D) for x in (k, v))
    got = decode(q, *pages, lengths, starts=starts, block_table=table)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_cross_entropy():
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
        how = {"reduction": "sum" if inplace else "none", "inplace_grad": inplace}
        loss = cross_entropy(leaf, targets, valid_vocab=VALID, **how)
        assert inplace or torch.equal(loss[tail], want)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(gradient[tail], dlast, rtol=0.01, atol=1e-6)
        del gradient


def test_rotary():
    B, T, H, D = 36, 65_536, 15, 64
    need(30)
    qk = torch.empty(B, T, H + 1, D, dtype=torch.bfloat16, device="cuda").normal_()
    angles = ROTARY.options({"T": T, "D": D}, "cuda").values()
    last = qk[-1:].clone()  # every element of it lies beyond 2**31
    want = rotary(last[:, :, :H], last[:, :, H:], *angles)
    got = rotary(qk[:, :, :H], qk[:, :, H:], *angles)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[-1:], b)
