"""The cases of activations, rotary positions and decoding; `bench.cases` lists them, too."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from bench import work
from bench.op import Op
from bench.peers import Maker, always, compiled, flash_attn_decoding, liger
from bench.shapes import ACTIVATIONS, DECODING, GATED, ROTARY
from fastgpt.kernels.bias_act.op import ACTIVATIONS as PLAIN
from fastgpt.kernels.bias_act.op import bias_act, bias_act_ref
from fastgpt.kernels.decode_attention.op import decode_attention, decode_attention_ref
from fastgpt.kernels.rotary.op import rotary, rotary_ref


def _bias_act_op(name: str, kind: str, **own: Any) -> Op:
    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return PLAIN[kind](x + bias)

    return Op(
        name=name,
        inputs=lambda s, make: {"x": make(s["M"], s["N"]), "bias": make(s["N"])},
        ref=partial(bias_act_ref, kind=kind),
        implementations={
            "ours": always(partial(bias_act, kind=kind)),
            "eager": always(eager),
            "compiled": compiled(eager),
            **own.pop("peers", {}),
        },
        **own,
    )


def _liger_swiglu(on: str) -> Callable[..., Tensor]:
    product = liger("swiglu", "LigerSiLUMulFunction", None)(on)
    return lambda x, bias: product(*(x + bias).chunk(2, dim=-1))


@functools.cache
def _angles(T: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, D, 2, device=device) / D)
    angles = torch.outer(torch.arange(T, device=device), frequencies)
    return angles.cos(), angles.sin()


def _turning(op: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`op` with the angles of GPT-NeoX, made once: (q, k) -> both turned."""

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return op(q, k, *_angles(q.shape[1], q.shape[3], q.device))

    return turn


def _eager_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        c, s = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (cos, sin))
        a, b = x.chunk(2, dim=-1)
        return x * c + torch.cat((-b, a), -1) * s

    return turn(q), turn(k)


def _eager_decoding(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = ((q * q.shape[3] ** -0.5) @ k.transpose(2, 3)).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _sdpa_decoding(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


DECODERS: dict[str, Maker] = {
    "eager": always(_eager_decoding),
    "compiled": compiled(_eager_decoding),
    "sdpa": always(_sdpa_decoding),
    "flash-attn-2": flash_attn_decoding("flash_attn", "flash-attn 2"),
    "flash-attn-3": flash_attn_decoding("flash_attn_interface", "flash-attn 3"),
}

OTHERS = (
    _bias_act_op("bias_act", "gelu_tanh", work=work.bias_act, shapes=ACTIVATIONS),
    _bias_act_op(
        "bias_act_swiglu",
        "swiglu",
        work=work.gated,
        shapes=GATED,
        peers={"liger": _liger_swiglu},
    ),
    Op(
        name="rotary",
        inputs=lambda s, make: {x: make(s["B"], s["T"], s["H"], s["D"]) for x in "qk"},
        ref=_turning(rotary_ref),
        implementations={
            "ours": always(_turning(rotary)),
            "eager": always(_turning(_eager_rotary)),
            # compiled inside of `turn`: traced through it, the angles would be computed each time
            "compiled": lambda on: _turning(compiled(_eager_rotary)(on)),
        },
        work=work.rotary,
        shapes=ROTARY,
    ),
    Op(
        name="decode_attention",
        inputs=lambda s, make: {
            "q": make(s["B"], 1, s["H"], s["D"]),
            "k_cache": make(s["B"], s["T"], s["H"], s["D"]),
            "v_cache": make(s["B"], s["T"], s["H"], s["D"]),
            # every cache is full; int32, which all of them take without a conversion
            "lengths": (make(s["B"], below=1) + s["T"]).int(),
        },
        ref=decode_attention_ref,
        implementations={"ours": always(decode_attention), **DECODERS},
        work=work.decode_attention,
        shapes=DECODING,
        passes=("fwd",),
    ),
)
