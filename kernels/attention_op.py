"""The ops that torch knows attention by.

Two ops, because of the gradient. `attention` takes q, k and v apart. `attention_packed` takes the
projection (B, T, H + 2 K, D) they are slices of and returns one gradient for it, which its kernels
write slice by slice. Finding out that q, k and v share a buffer would not do: autograd would still
concatenate their three gradients, the split's backward being a node of its own, and an op's outputs
must not be views of one buffer.

Shapes
    as in attention_fwd
"""

from typing import Any

import torch
from torch import Tensor

from kernels.runtime import define_op

_OPTIONS = (
    "Tensor? starts, Tensor? ends, Tensor? seed, float? scale, bool causal, SymInt? window, "
    "float dropout_p"
)


# The kernels are imported when first run: triton is missing on macOS and slow to import.


def _fwd(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    from kernels.attention_launch import Options, attention_fwd

    return attention_fwd(q, k, v, Options(*options))


def _bwd(
    dout: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor,
    options: tuple[Any, ...], grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    from kernels.attention_launch import Options, attention_bwd

    attention_bwd(dout, *qkv, out, lse, Options(*options), grads)


def _fake_fwd(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, Tq, H, D = q.shape
    return q.new_empty((B, Tq, H, D)), q.new_empty((B, H, Tq), dtype=torch.float32)


def _separate_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _bwd(dout, (q, k, v), out, lse, options, (dq, dk, dv))
    return dq, dk, dv


def _fake_separate_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


_attention_bwd_op = define_op(
    "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _separate_bwd,
    _fake_separate_bwd,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Tensors of any count first, then starts, ends, seed and the four settings."""
    *tensors, starts, ends, seed, scale, causal, window, dropout_p = inputs
    ctx.save_for_backward(*tensors, *output, starts, ends, seed)
    ctx.settings = (scale, causal, window, dropout_p)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 10
    return *_attention_bwd_op(dout, *ctx.saved_tensors, *ctx.settings), *(None,) * 7


attention_op = define_op(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _fwd,
    _fake_fwd,
    setup_context=_save,
    backward=_backward,
)


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    K = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.split((heads, K, K), dim=2)
    return q, k, v


def _packed_fwd(qkv: Tensor, heads: int, *options: Any) -> tuple[Tensor, Tensor]:
    return _fwd(*_split(qkv, heads), *options)


def _fake_packed_fwd(qkv: Tensor, heads: int, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_fwd(qkv[:, :, :heads])


def _packed_bwd(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *options: Any) -> Tensor:
    heads = out.shape[2]
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    _bwd(dout, _split(qkv, heads), out, lse, options, _split(dqkv, heads))
    return dqkv


_attention_packed_bwd_op = define_op(
    f"attention_packed_bwd(Tensor dout, Tensor qkv, Tensor out, Tensor lse, {_OPTIONS}) -> Tensor",
    _packed_bwd,
    lambda dout, qkv, *_: qkv.new_empty(qkv.shape),
)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, _, *options = inputs
    _save(ctx, (qkv, *options), output)


def _packed_backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 9
    return _attention_packed_bwd_op(dout, *ctx.saved_tensors, *ctx.settings), *(None,) * 8


attention_packed_op = define_op(
    f"attention_packed(Tensor qkv, SymInt heads, {_OPTIONS}) -> (Tensor, Tensor)",
    _packed_fwd,
    _fake_packed_fwd,
    setup_context=_save_packed,
    backward=_packed_backward,
)
