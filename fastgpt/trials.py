"""The ops that `fastgpt.choose` tries: ours beside PyTorch's, on inputs of a run's own sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt import ops
from fastgpt.config import ModelConfig
from fastgpt.kernels import attention_ref, bias_act, parity
from fastgpt.kernels.bias_act.op import ACTIVATIONS
from fastgpt.positions import Rotary


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the trial of a run depends on, beside the machine."""

    model: ModelConfig
    batch: int
    """Sequences that go through the model at once."""
    precision: str
    compiled: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """An op of ours beside PyTorch's."""

    plain: str
    ours: str
    ops: Mapping[str, parity.Op]
    ref: parity.Op
    inputs: Callable[[int, int], dict[str, Tensor]]
    """Of so many sequences, so long; activations in the run's precision, weights in fp32."""
    worth: float = 1.0
    """Ours is taken up to so many times PyTorch's time."""


def _attention(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    model = sizes.model
    heads = (model.num_heads, model.kv_heads, model.kv_heads)

    def inputs(batch: int, T: int) -> dict[str, Tensor]:
        qkv = torch.randn(batch, T, sum(heads), model.head_dim, device=on, dtype=dtype)
        return dict(zip("qkv", qkv.split(heads, dim=2), strict=True))  # views, as in the model

    def with_options(op: parity.Op) -> parity.Op:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            B, T = q.shape[:2]
            ids = None
            if model.document_mask:  # three documents
                ids = (torch.arange(T, device=on) * 3 // T).expand(B, T).contiguous()
            scale = model.attention_scale
            return op(q, k, v, scale=scale, window=model.window, doc_ids=ids)  # pyright: ignore

        return run

    named = {name: with_options(ops.ATTENTION[name]) for name in ("sdpa", "triton")}
    return Trial("sdpa", "triton", named, with_options(attention_ref), inputs)


def _norm(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    model, layer = sizes.model, sizes.model.norm == "layernorm"
    with_bias = layer and model.bias

    def inputs(batch: int, T: int) -> dict[str, Tensor]:
        shape = (batch, T, model.dim)
        x = torch.randn(shape, device=on, dtype=dtype)
        weights = {"weight": torch.rand(model.dim, device=on) + 0.5}
        if with_bias:
            weights["bias"] = torch.randn(model.dim, device=on)
        return {"x": x, "residual": torch.randn(shape, device=on), **weights}

    def named(norms: ops.Norms) -> parity.Op:
        if not layer:
            return partial(norms.add_rms_norm, eps=1e-6)
        fixed: dict[str, Any] = {"eps": 1e-5} if with_bias else {"bias": None, "eps": 1e-5}
        return partial(norms.add_layer_norm, **fixed)

    both = {name: named(norms) for name, norms in ops.NORMS.items()}
    return Trial("torch", "triton", both, both["torch"], inputs)


def _loss(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    model = sizes.model

    def inputs(batch: int, T: int) -> dict[str, Tensor]:
        shape = (batch, T)
        return {
            "x": torch.randn(*shape, model.dim, device=on, dtype=dtype),
            "weight": torch.randn(model.padded_vocab, model.dim, device=on) * model.dim**-0.5,
            "targets": torch.randint(model.vocab_size or 0, shape, device=on),
        }

    fixed = {"valid_vocab": model.vocab_size, "softcap": model.softcap}
    both: dict[str, parity.Op] = {name: partial(op, **fixed) for name, op in ops.LOSS.items()}
    # it halves a step's memory, which is worth more than a twentieth of the loss's time
    return Trial("torch", "chunked", both, both["torch"], inputs, worth=1.05)


def _rotary(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    attention = _attention(sizes, on, dtype)

    def inputs(batch: int, T: int) -> dict[str, Tensor]:
        qkv = attention.inputs(batch, T)
        return {"q": qkv["q"], "k": qkv["k"]}

    def with_angles(op: parity.Op) -> parity.Op:
        def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            # how far each place turns is the same for all
            cos, sin = (angles[: q.shape[1]] for angles in (rotary.cos, rotary.sin))
            return tuple(op(q, k, cos, sin))

        return run

    rotary = Rotary(sizes.model).to(on)
    both = {name: with_angles(op) for name, op in ops.ROTARY.items()}
    return Trial("torch", "triton", both, both["torch"], inputs)


def _activation(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    model, kind = sizes.model, sizes.model.activation
    width = model.ffn_width * (2 if kind == "swiglu" else 1)

    def inputs(batch: int, T: int) -> dict[str, Tensor]:
        found = {
            "x": torch.randn(batch, T, model.dim, device=on, dtype=dtype),
            "weight": torch.randn(width, model.dim, device=on) * model.dim**-0.5,
        }
        return {**found, "bias": torch.randn(width, device=on)} if model.bias else found

    # with the product before it, which adds PyTorch's bias for nothing
    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return ACTIVATIONS[kind](F.linear(x, weight, bias))

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return bias_act(F.linear(x, weight), bias, kind)

    return Trial("torch", "triton", {"torch": plain, "triton": ours}, plain, inputs)


TRIALS = {
    "attention": _attention,
    "norm": _norm,
    "loss": _loss,
    "rotary": _rotary,
    "activation": _activation,
}
