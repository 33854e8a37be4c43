"""Puts a Triton kernel of your own into a GPT: GELU approximated as x sigmoid(1.702 x).

    python examples/own_kernel.py

Without CUDA the kernel is interpreted. `fastgpt.ops.protocols` says what each op of a model
computes; CONTRIBUTING.md says how an op that becomes part of fastgpt is tested.
"""

import os
from dataclasses import replace

import torch

os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))  # before the next line
import triton
import triton.language as tl
from torch import Tensor

import fastgpt
from fastgpt.ops import select

BLOCK = tl.constexpr(1024)


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(y_ptr + offs, x / (1 + tl.exp(-1.702 * x)), mask=offs < n)


class GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        gelu_kernel[(triton.cdiv(x.numel(), BLOCK.value),)](x, y, x.numel())
        return y

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        [x], [dy] = ctx.saved_tensors, gradients
        gate = torch.sigmoid(1.702 * x)
        return dy * gate * (1 + 1.702 * x * (1 - gate))


def gelu(x: Tensor, bias: Tensor | None, kind: str = "") -> Tensor:
    """Has the signature of `fastgpt.ops.protocols.Ops.activation`."""
    return GELU.apply(x.contiguous() if bias is None else x + bias)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, bias = torch.randn(2, 3, 7, dtype=torch.float64, device=device, requires_grad=True)
    torch.autograd.gradcheck(gelu, (x, bias))

    config = fastgpt.ModelConfig(num_layers=2, num_heads=2, dim=32, context=32, vocab_size=50)
    ops = replace(select(fastgpt.OpsConfig(), device), activation=gelu)
    model = fastgpt.build_model(config, ops).to(device)
    tokens = torch.randint(50, (4, 33), device=device)
    loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    loss.backward()
    print(f"loss {loss.item():.3f}, of a model with {ops.activation}")


if __name__ == "__main__":
    main()
