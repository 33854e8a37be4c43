"""Trials of `fastgpt.autotune.choose`: our ops beside PyTorch's, with inputs of the run's sizes.

Inputs and references come from each op's `Spec`; this module adds the options of the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor
from torch.func import functional_call

from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.kernels import bias_act, parity
from fastgpt.kernels.bias_act.op import ACTIVATIONS
from fastgpt.kernels.runtime import with_gradient_of
from fastgpt.kernels.spec import Problem, with_input_bias
from fastgpt.kernels.specs import SPECS
from fastgpt.model.block import Block
from fastgpt.model.layers import Residual, norm_fuses_bias_grad
from fastgpt.model.positions import Rotary
from fastgpt.ops import tables

Inputs = Callable[[int, int], dict[str, Tensor]]
"""Function that makes inputs from the number of sequences and their length."""
WEIGHTS = ("weight", "bias", "input_bias")
"""Inputs that stay in fp32 under autocast; the residual does so, too, unless it is narrow."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and settings of a run that affect its trials."""

    model: ModelConfig
    batch: int
    """Number of sequences in a micro-batch."""
    precision: str
    compiled: bool
    narrow_residual: bool = False
    """True if the residual stream has autocast's dtype instead of fp32."""
    transformers: bool = False
    """True for a model of transformers, which calls the ops in other forms: q, k and v apart, norms
    without the sum, activations after the bias, SwiGLU of two matrix products."""
    sets: dict[str, OpsConfig] = field(default_factory=dict)
    """Ops to compare in the trial `layer`, by a name for them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Two implementations of the same computation, of which the faster one is chosen."""

    ops: Mapping[str, parity.Op]
    """By name: ours, which is chosen if both are equally fast, and PyTorch's."""
    inputs: Inputs
    ref: parity.Op | None = None
    """Reference by which ours is checked; None: they are not checked."""
    worth: float = 1.0
    """Largest time of ours, relative to the fastest other one's, at which ours is chosen."""


def _inputs(
    name: str, problem: Problem, on: str, dtype: torch.dtype, narrow_residual: bool = False
) -> Inputs:
    """Returns a function that makes the spec's inputs for B sequences of T tokens."""
    wide = WEIGHTS if narrow_residual else (*WEIGHTS, "residual")

    def make(*sizes: int, below: int = 0) -> Tensor:
        return torch.randint(below, sizes, device=on) if below else torch.randn(sizes, device=on)

    def inputs(B: int, T: int) -> dict[str, Tensor]:
        made = SPECS[name].inputs({"B": B, "T": T, "M": (B, T), **problem}, make)
        return {
            name: x if name in wide or not x.is_floating_point() else x.to(dtype)
            for name, x in made.items()
        }

    return inputs


def _projected(model: ModelConfig, on: str, dtype: torch.dtype, *, biased: bool = False) -> Inputs:
    """Returns a function that makes `qkv`, all heads of queries, keys and values in one tensor."""
    problem = {"H": model.num_heads, "K": model.kv_heads, "D": model.head_dim}
    return _inputs("attention_packed", {**problem, "input_bias": biased}, on, dtype)


def _documents(model: ModelConfig, B: int, T: int, on: str) -> Tensor | None:
    """Returns the ids of three documents in each row, if the model separates them."""
    if not model.document_mask:
        return None
    return (torch.arange(T, device=on) * 3 // T).expand(B, T).contiguous()


def _attention(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    """Makes the trial of what the model calls: one tensor of q, k and v, or its three parts.

    Either way the gradient is one tensor again, which costs a concatenation of three.
    """
    model = sizes.model
    heads = (model.num_heads, model.kv_heads, model.kv_heads)
    apart = sizes.transformers or model.position == "rotary" or model.qk_norm

    def options(qkv: Tensor) -> dict[str, Any]:
        ids = _documents(model, qkv.shape[0], qkv.shape[1], on)
        return {"scale": model.attention_scale, "window": model.window, "doc_ids": ids}

    def split(op: Callable[..., Tensor]) -> parity.Op:
        def run(qkv: Tensor, input_bias: Tensor | None = None) -> Tensor:
            qkv = with_gradient_of(input_bias, qkv.flatten(2)).view(qkv.shape)
            return op(*qkv.split(heads, dim=2), **options(qkv))

        return run

    def packed(qkv: Tensor, input_bias: Tensor | None = None) -> Tensor:
        return tables.PACKED_ATTENTION["triton"](
            qkv, model.num_heads, **options(qkv), input_bias=input_bias
        )

    ours = split(tables.ATTENTION["triton"]) if apart else packed
    both = {"triton": ours, "sdpa": split(tables.ATTENTION["sdpa"])}
    inputs = _projected(model, on, dtype, biased=not apart and model.bias_at("qkv"))
    return Trial(both, inputs, split(SPECS["attention"].ref))


def _norm(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    model, norms = sizes.model, tables.NORMS
    summed = not sizes.transformers
    op = f"{'add_' * summed}{'layer_norm' if model.norm == 'layernorm' else 'rms_norm'}"
    fused = summed and norm_fuses_bias_grad(model, norms["triton"], "residual")
    biased = fused and model.bias_at("projection")
    options: dict[str, Any] = {"eps": model.epsilon, "input_bias": biased}
    if model.norm == "layernorm" and not model.bias:
        options["bias"] = None
    problem = {"N": model.dim, "without": () if model.bias else ("bias",), "input_bias": biased}
    both = {
        name: partial(with_input_bias(getattr(norms[name], op)), **options)
        for name in ("triton", "torch")
    }
    inputs = _inputs(op, problem, on, dtype, sizes.narrow_residual)
    return Trial(both, inputs, partial(SPECS[op].ref, **options))


def _loss(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    model = sizes.model
    options = {"valid_vocab": model.vocab_size, "softcap": model.softcap}
    problem = {"C": model.dim, "V": model.padded_vocab, "valid_vocab": model.vocab_size}
    drawn = _inputs("linear_cross_entropy", problem, on, dtype)

    def inputs(B: int, T: int) -> dict[str, Tensor]:
        made = drawn(B, T)
        return {**made, "weight": made["weight"] * model.dim**-0.5}  # logits of about 1

    both = {name: partial(tables.LOSS[name], **options) for name in ("chunked", "torch")}
    ref = partial(SPECS["linear_cross_entropy"].ref, **options)
    # it halves a step's memory, which is worth more than a twentieth of the loss's time
    return Trial(both, inputs, ref, worth=1.05)


def _rotary(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    model, angles = sizes.model, Rotary(sizes.model).to(on)
    heads = (model.num_heads, model.kv_heads, model.kv_heads)
    projected = _projected(model, on, dtype)

    def inputs(B: int, T: int) -> dict[str, Tensor]:
        q, k, _ = projected(B, T)["qkv"].split(heads, dim=2)  # views, as in the model
        return {"q": q, "k": k}

    def with_angles(op: parity.Op) -> parity.Op:
        def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            return tuple(op(q, k, *(x[: q.shape[1]] for x in (angles.cos, angles.sin))))

        return run

    both = {name: with_angles(tables.ROTARY[name]) for name in ("triton", "torch")}
    return Trial(both, inputs, with_angles(SPECS["rotary"].ref))


def _activation(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    """Makes the trial with the matrix product before it, which adds PyTorch's bias at no cost."""
    model, kind = sizes.model, sizes.model.activation
    width = model.ffn_width * (2 if kind == "swiglu" else 1)

    def inputs(B: int, T: int) -> dict[str, Tensor]:
        found = {
            "x": torch.randn(B, T, model.dim, device=on, dtype=dtype),
            "weight": torch.randn(width, model.dim, device=on) * model.dim**-0.5,
        }
        return {**found, "bias": torch.randn(width, device=on)} if model.bias else found

    halved = sizes.transformers and kind == "swiglu"  # two matrix products, without biases

    def apart(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [F.linear(x, half) for half in weight.chunk(2)]

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if halved:
            return bias_act(torch.cat(apart(x, weight), -1), None, kind)
        if sizes.transformers:
            return bias_act(F.linear(x, weight, bias), None, kind)
        return bias_act(F.linear(x, weight), bias, kind)

    def ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return ACTIVATIONS[kind](F.linear(x, weight, bias))

    def gated(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = apart(x, weight)
        return F.silu(gate) * up

    return Trial({"triton": ours, "torch": gated if halved else ref}, inputs, ref)


def _layer(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    """Makes the trial of a layer of the model with each of `sizes.sets`.

    The weights are inputs, too, so that their gradients are computed.
    """
    model = sizes.model
    layers = {
        name: Block(model, tables.select(chosen, on)).to(on) for name, chosen in sizes.sets.items()
    }
    angles = Rotary(model).to(on) if model.position == "rotary" else None
    pre_norm = model.norm_position == "pre"
    weights = dict(next(iter(layers.values())).named_parameters())

    def inputs(B: int, T: int) -> dict[str, Tensor]:
        found = {"x": torch.randn(B, T, model.dim, device=on, dtype=dtype)}
        if pre_norm:
            residual = torch.randn(B, T, model.dim, device=on)
            found["residual"] = residual.to(dtype) if sizes.narrow_residual else residual
        return found | {name: weight.detach().clone() for name, weight in weights.items()}

    def op_of(block: Block) -> parity.Op:
        def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            values = dict(zip(weights, rest[pre_norm:], strict=True))
            # its own bias in place of that of the layer before, whose gradient is computed here
            fused_bias = values.get("mlp.c_proj.bias") if block.mlp.c_proj.fuses_bias_grad else None
            residual = Residual(rest[0], fused_bias) if pre_norm else None
            B, T = x.shape[:2]
            cos_sin = None if angles is None else angles(slice(T))
            args = (x, residual, cos_sin, _documents(model, B, T, on), None)
            y, after = functional_call(block, values, args)
            return (y,) if after is None else (y, after.stream)

        return run

    return Trial({name: op_of(block) for name, block in layers.items()}, inputs)


TRIALS = {
    "attention": _attention,
    "norm": _norm,
    "loss": _loss,
    "rotary": _rotary,
    "activation": _activation,
}
"""Trials of one op each."""
ALL_TRIALS = TRIALS | {"layer": _layer}
