"""The loop of `kernels.linear_cross_entropy` over chunks of tokens: losses and wanted gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from .op import in_place
from .plain import Options

CHUNK_BYTES = {"cuda": 420 << 20, "cpu": 64 << 20}
"""Of logits at a time: of GPT-2's 50,304, 4096 tokens in bf16 on a GPU.

On a CPU every logit counts as fp32: 256 tokens, more than which are no faster in bf16 either.
"""


class Wanted(NamedTuple):
    """Which gradients, the dtype of the products, tokens at a time (0: what CHUNK_BYTES holds)."""

    of_x: bool
    of_weight: bool
    of_bias: bool
    dtype: torch.dtype
    chunk_tokens: int


class Gradients(NamedTuple):
    """Of x in the dtype of the products, of weight and bias in fp32; empty where not asked for."""

    x: Tensor
    weight: Tensor
    bias: Tensor


def tokens_at_a_time(M: int, V: int, dtype: torch.dtype, device: torch.device, asked: int) -> int:
    """Tokens in a chunk: as asked, else what CHUNK_BYTES holds, in chunks of about one size."""
    if asked:
        return asked
    kind = "cpu" if device.type == "cpu" else "cuda"
    most = CHUNK_BYTES[kind] // (V * (4 if kind == "cpu" else dtype.itemsize))
    most = max(1, most // 128 * 128 or most)
    chunks = max(1, -(-M // most))
    return min(most, -(-M // (128 * chunks)) * 128)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: Tensor | None,
    wanted: Wanted,
    options: Options,
) -> tuple[Tensor, Gradients]:
    """Losses (M,), and the gradients of their sum weighted by `scale`, () or (M,) fp32.

    The products are of numbers in `wanted.dtype`; weight's and bias's gradients add up in fp32.
    """
    V, C = weight.shape
    of_x, of_weight, of_bias, dtype, chunk_tokens = wanted
    rows = x.reshape(-1, C).to(dtype)
    M, device = rows.shape[0], x.device

    def empty(is_wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape if is_wanted else (0,), dtype=dtype, device=device)

    grads = Gradients(empty(of_x, M, C, dtype=dtype), empty(of_weight, V, C), empty(of_bias, V))
    losses = torch.empty(M, dtype=torch.float32, device=device)
    if M == 0:
        return losses, Gradients(grads.x, grads.weight.zero_(), grads.bias.zero_())
    across = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    chunk = tokens_at_a_time(M, V, dtype, device, chunk_tokens)
    memory = torch.empty((min(chunk, M), V), dtype=dtype, device=device)
    for start in range(0, M, chunk):
        part = slice(start, min(start + chunk, M))
        logits = memory[: part.stop - start]
        if bias is None:
            torch.mm(rows[part], across.t(), out=logits)
        else:
            torch.addmm(bias, rows[part], across.t(), out=logits)
        by_row = scale[part] if scale is not None and scale.dim() else scale
        losses[part] = in_place(logits, targets[part], by_row, options)
        if of_x:
            torch.mm(logits, across, out=grads.x[part])
        if of_weight:
            _accumulate_product(grads.weight, logits.t(), rows[part], first=start == 0)
        if of_bias:
            summed = logits.sum(0, dtype=torch.float32)
            grads.bias.copy_(summed) if start == 0 else grads.bias.add_(summed)
    return losses, grads


def _accumulate_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a @ b in fp32; the first product does not read it."""
    beta = 0 if first else 1
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:  # on a CPU a product of bf16 is bf16: of a few rows at a time, so that it stays in cache
        memory = torch.empty((min(8192, total.shape[0]), total.shape[1]), dtype=a.dtype)
        for start in range(0, total.shape[0], 8192):
            part = total[start : start + 8192]
            product = torch.mm(a[start : start + 8192], b, out=memory[: part.shape[0]])
            part.copy_(product) if first else part.add_(product)
