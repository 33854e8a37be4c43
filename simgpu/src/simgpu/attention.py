"""The three kernels of scaled_dot_product_attention, from the CPU's flash attention.

Each gets the results in the layout that its CUDA kernel leaves them in, which compiled code checks.
"""

from typing import Any

import torch

Tensor = torch.Tensor
aten, simgpu = torch.ops.aten, torch.ops.simgpu


def _host(x: Tensor | None) -> Tensor | None:
    return x if x is None or not x.is_cuda else simgpu.host(x)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output, (B, H, T, D) in memory of (B, T, H, D), and the log-sum-exp (B, H, T)."""
    arguments = [_host(x) for x in (q, k, v)]
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *arguments, p, causal, attn_mask=_host(bias), scale=scale
    )
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return simgpu.device(out, q), simgpu.device(logsumexp.contiguous(), q)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    bias: Tensor | None, p: float, causal: bool, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    arguments = [_host(x) for x in (dout, q, k, v, out, logsumexp)]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *arguments, p, causal, attn_mask=_host(bias), scale=scale
    )
    return tuple(simgpu.device(grad, q) for grad in grads)


def _numbers(q: Tensor) -> list[Tensor]:
    """The seed and the offset of dropout's random numbers, which are not drawn here."""
    return [torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2)]


def flash(q, k, v, p=0.0, causal=False, debug=False, *, scale=None) -> Any:
    """_scaled_dot_product_flash_attention."""
    out, logsumexp = _forward(q, k, v, None, p, causal, scale)
    mask = torch.empty(0, dtype=q.dtype, device=q.device)
    return out, logsumexp, None, None, q.shape[2], k.shape[2], *_numbers(q), mask


def flash_backward(
    dout, q, k, v, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None
) -> Any:
    """_scaled_dot_product_flash_attention_backward."""
    return _backward(dout, q, k, v, out, lse, None, p, causal, scale)


def efficient(q, k, v, bias, want_lse, p=0.0, causal=False, *, scale=None) -> Any:
    """_scaled_dot_product_efficient_attention."""
    return *_forward(q, k, v, bias, p, causal, scale), *_numbers(q)


def efficient_backward(
    dout, q, k, v, bias, out, lse, seed, offset, p, needed, causal=False, *, scale=None
) -> Any:
    """_scaled_dot_product_efficient_attention_backward; a bias that wants a gradient is refused."""
    if needed[3]:
        raise NotImplementedError("simgpu: the gradient of attention's bias is not simulated")
    return *_backward(dout, q, k, v, out, lse, bias, p, causal, scale), None


def cudnn(q, k, v, bias, want_lse, p=0.0, causal=False, debug=False, *, scale=None) -> Any:
    """_scaled_dot_product_cudnn_attention."""
    out, logsumexp = _forward(q, k, v, bias, p, causal, scale)
    mask = torch.empty(0, dtype=q.dtype, device=q.device)
    return out, logsumexp.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_numbers(q), mask


def cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, p, causal, *, scale=None
) -> Any:
    """_scaled_dot_product_cudnn_attention_backward."""
    return _backward(dout, q, k, v, out, lse.squeeze(-1), bias, p, causal, scale)


KERNELS = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
