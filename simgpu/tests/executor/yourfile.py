"""Kernels of a user, with checks of their results and a fault."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax(x, y, n, stride, BLOCK: tl.constexpr, MASK: tl.constexpr = True):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < n if MASK else column < BLOCK
    logits = tl.load(x + row * stride + column, inside, other=float("-inf")).to(tl.float32)
    e = tl.exp(logits - tl.max(logits, 0))
    tl.store(y + row * stride + column, (e / tl.sum(e, 0)).to(y.dtype.element_ty), inside)


@triton.jit
def matmul(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None], tl.arange(0, K)
    product = tl.dot(tl.load(a + m * K + k[None]), tl.load(b + k[:, None] * N + n))
    tl.store(c + m * N + n, product)


def check():
    for dtype, most in ((torch.float32, 1e-7), (torch.bfloat16, 1e-3)):
        x = torch.randn(5, 300).to(dtype)
        y = torch.empty_like(x)
        softmax[lambda given: (2560 // given["BLOCK"],)](x, y, 300, stride=300, BLOCK=512)
        assert (y.float() - x.float().softmax(-1)).abs().max() < most
    a, b, c = torch.randn(64, 32).half(), torch.randn(32, 64).half(), torch.empty(64, 64)
    matmul[(1,)](a, b, c, M=64, N=64, K=32, num_warps=4)
    assert torch.allclose(c, a.float() @ b.float(), atol=1e-5)


def forgotten():
    x = torch.randn(5, 300)
    softmax[(5,)](x, x, 300, 300, 512, MASK=False)


if __name__ == "__main__":
    check()
