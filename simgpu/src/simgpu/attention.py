"""The three kernels of scaled_dot_product_attention, from the CPU's flash attention.

Each gets the results in the layout that its CUDA kernel leaves them in, which compiled code checks.
With dropout they are computed plainly, because the CPU's kernel has none.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from simgpu import launches

Tensor = torch.Tensor
aten, simgpu = torch.ops.aten, torch.ops.simgpu


def _host(x: Any) -> Any:
    return x if x is None or not x.is_cuda else simgpu.host(x)


def _factor(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _probabilities(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the softmax of the scores and their log-sum-exp, in fp32."""
    scores = q.float() @ k.float().mT * _factor(q, scale)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp[..., None]).exp(), logsumexp


def _dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Drops out elements of x, those that `seed` draws."""
    drawn = torch.Generator().manual_seed(int(seed.view(torch.int64).flatten()[0]))
    kept = torch.rand(x.shape, generator=drawn) >= p
    return x * kept / (1 - p)


def _again_in_graphs(function: Callable[..., tuple[Tensor, ...]]) -> Any:
    """Lets a graph that is captured call a function of tensors anew, into the same results."""

    def call(*args: Any) -> tuple[Tensor, ...]:
        results = function(*args)
        stream = torch.cuda.current_stream().cuda_stream
        held, outs = ([kept(x) for x in xs] for xs in (args, results))
        launches.keep_if_captured(stream, "attention", lambda _: again(held, outs))
        return results

    def kept(x: Any) -> Any:
        return simgpu.kept(x) if isinstance(x, Tensor) else x

    def again(args: list[Any], outs: list[Tensor]) -> int:
        for out, new in zip(outs, function(*args), strict=True):
            out.copy_(new)
        return 0

    return call


def _forward(
    q: Tensor, *args: Any, of_seed: tuple[int, ...] = (), dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the output, (B, H, T, D) in memory of (B, T, H, D), the log-sum-exp (B, H, T), and
    seed and offset of dropout's random numbers.
    """
    seed, offset = (torch.empty(n, dtype=torch.int64, device=q.device) for n in (of_seed, ()))
    if args[3]:
        seed.random_(2**62)
    seed, offset = seed.view(dtype), offset.view(dtype)
    return *_attend(q, *args, seed), seed, offset


@_again_in_graphs
def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool,
    scale: float | None, seed: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    hq, hk, hv = (_host(x) for x in (q, k, v))
    if p:
        weights, logsumexp = _probabilities(hq, hk, _host(bias), causal, scale)
        out = (_dropout(weights, p, _host(seed)) @ hv.float()).to(q.dtype)
    else:
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            hq, hk, hv, p, causal, attn_mask=_host(bias), scale=scale
        )
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return tuple(simgpu.device(x, q) for x in (out, logsumexp.contiguous()))


@_again_in_graphs
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    bias: Tensor | None, seed: Tensor, p: float, causal: bool, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dout, hq, hk, hv = (_host(x) for x in (dout, q, k, v))
    if p:
        weights, _ = _probabilities(hq, hk, _host(bias), causal, scale)
        dv = _dropout(weights, p, _host(seed)).mT @ dout.float()
        ds = weights * _dropout(dout.float() @ hv.float().mT, p, _host(seed))
        ds = (ds - weights * ds.sum(-1, keepdim=True)) * _factor(q, scale)
        grads = ds @ hk.float(), ds.mT @ hq.float(), dv
        grads = [torch.empty_like(x).copy_(dx) for x, dx in zip((hq, hk, hv), grads)]
    else:
        saved = _host(out), _host(logsumexp)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, hq, hk, hv, *saved, p, causal, attn_mask=_host(bias), scale=scale
        )
    return tuple(simgpu.device(grad, q) for grad in grads)


def flash(q, k, v, p=0.0, causal=False, debug=False, *, scale=None) -> Any:
    """_scaled_dot_product_flash_attention."""
    of = {"of_seed": (2,), "dtype": torch.uint64}
    out, logsumexp, *numbers = _forward(q, k, v, None, p, causal, scale, **of)
    mask = torch.empty(0, dtype=q.dtype, device=q.device)
    return out, logsumexp, None, None, q.shape[2], k.shape[2], *numbers, mask


def flash_backward(
    dout, q, k, v, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None
) -> Any:
    """_scaled_dot_product_flash_attention_backward."""
    return _backward(dout, q, k, v, out, lse, None, seed, p, causal, scale)


def efficient(q, k, v, bias, want_lse, p=0.0, causal=False, *, scale=None) -> Any:
    """_scaled_dot_product_efficient_attention."""
    return _forward(q, k, v, bias, p, causal, scale)


def efficient_backward(
    dout, q, k, v, bias, out, lse, seed, offset, p, needed, causal=False, *, scale=None
) -> Any:
    """_scaled_dot_product_efficient_attention_backward; a bias that wants a gradient is refused."""
    if needed[3]:
        raise NotImplementedError("simgpu: the gradient of attention's bias is not simulated")
    return *_backward(dout, q, k, v, out, lse, bias, seed, p, causal, scale), None


def cudnn(q, k, v, bias, want_lse, p=0.0, causal=False, debug=False, *, scale=None) -> Any:
    """_scaled_dot_product_cudnn_attention."""
    out, logsumexp, *numbers = _forward(q, k, v, bias, p, causal, scale)
    mask = torch.empty(0, dtype=q.dtype, device=q.device)
    return out, logsumexp.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *numbers, mask


def cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, p, causal, *, scale=None
) -> Any:
    """_scaled_dot_product_cudnn_attention_backward."""
    return _backward(dout, q, k, v, out, lse.squeeze(-1), bias, seed, p, causal, scale)


KERNELS = {
    "aten::_scaled_dot_product_flash_attention": flash,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_efficient_attention": efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention": cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
