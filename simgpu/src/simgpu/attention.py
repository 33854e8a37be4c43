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


def _probabilities(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the softmax of the scores and their log-sum-exp, in fp32."""
    scores = q.float() @ k.float().mT * scale
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


@_again_in_graphs
def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool,
    scale: float, seed: Tensor,
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
    bias: Tensor | None, seed: Tensor, p: float, causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    dout, hq, hk, hv = (_host(x) for x in (dout, q, k, v))
    if p:
        weights, _ = _probabilities(hq, hk, _host(bias), causal, scale)
        dv = _dropout(weights, p, _host(seed)).mT @ dout.float()
        ds = weights * _dropout(dout.float() @ hv.float().mT, p, _host(seed))
        ds = (ds - weights * ds.sum(-1, keepdim=True)) * scale
        grads = ds @ hk.float(), ds.mT @ hq.float(), dv
        grads = [torch.empty_like(x).copy_(dx) for x, dx in zip((hq, hk, hv), grads)]
    else:
        saved = _host(out), _host(logsumexp)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, hq, hk, hv, *saved, p, causal, attn_mask=_host(bias), scale=scale
        )
    return tuple(simgpu.device(grad, q) for grad in grads)


def _kernel(kind: str, backward: str) -> Callable[..., tuple[Any, ...]]:
    """One of the kernels; it takes its arguments by their names in aten's schema."""
    schema = getattr(aten, f"_scaled_dot_product_{kind}_attention{backward}").default._schema

    def call(*args: Any, **given: Any) -> tuple[Any, ...]:
        a = {x.name.rstrip("_"): x.default_value for x in schema.arguments}
        a |= dict(zip(a, args)) | given
        qkv = q, k, _ = a["query"], a["key"], a["value"]
        scale = 1 / math.sqrt(q.shape[-1]) if a["scale"] is None else a["scale"]
        bias, how = a.get("attn_bias"), (a["dropout_p"], a["is_causal"], scale)
        if backward:
            if a.get("grad_input_mask", [False] * 4)[3]:
                raise NotImplementedError(
                    "simgpu: the gradient of attention's bias is not simulated"
                )
            lse = a["logsumexp"].squeeze(-1) if kind == "cudnn" else a["logsumexp"]
            grads = _backward(a["grad_out"], *qkv, a["out"], lse, bias, a["philox_seed"], *how)
            return (*grads, None) if kind == "efficient" else grads
        of, dtype = ((2,), torch.uint64) if kind == "flash" else ((), torch.int64)
        seed, offset = (torch.empty(n, dtype=torch.int64, device=q.device) for n in (of, ()))
        if a["dropout_p"]:
            seed.random_(2**62)
        numbers = seed.view(dtype), offset.view(dtype)
        out, lse = _attend(*qkv, bias, *how, numbers[0])
        if kind == "efficient":
            return out, lse, *numbers
        mask = torch.empty(0, dtype=q.dtype, device=q.device)
        lse = lse.unsqueeze(-1) if kind == "cudnn" else lse
        return out, lse, None, None, q.shape[2], k.shape[2], *numbers, mask

    return call


KERNELS = {
    f"aten::_scaled_dot_product_{kind}_attention{backward}": _kernel(kind, backward)
    for kind in ("flash", "efficient", "cudnn")
    for backward in ("", "_backward")
}
