"""Trials of `fastgpt.autotune.choose`: our ops beside PyTorch's, with inputs of the run's sizes.

Inputs, options and references are those of each op's `Spec`; this module chooses the problem.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.config.model import ModelConfig
from fastgpt.device.device import DTYPES
from fastgpt.kernels import bias_act, parity
from fastgpt.kernels.attention.spec import packed
from fastgpt.kernels.bias_act.op import ACTIVATIONS
from fastgpt.kernels.spec import Make, Problem, Spec, no_options, with_input_bias
from fastgpt.kernels.specs import SPECS
from fastgpt.model.layers import norm_fuses_bias_grad
from fastgpt.ops import tables

WEIGHTS = ("weight", "bias", "input_bias")
"""Inputs that stay in fp32 under autocast; the residual does so, too, unless it is narrow."""
Tried = tuple[Spec, dict[str, Any], dict[str, Callable[..., Any]]]
"""A trial's op, its problem but for the number of tokens, and its implementations by name: ours,
which is chosen if both are equally fast, and PyTorch's."""


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


@dataclass(frozen=True, slots=True)
class Trial:
    """Two implementations of the same computation, of which the faster one is chosen."""

    ops: Mapping[str, parity.Op]
    """By name: ours, and PyTorch's."""
    inputs: dict[str, Tensor]
    ref: parity.Op
    """Reference by which ours is checked."""


def make_trial(name: str, sizes: Sizes, on: str, B: int, T: int) -> Trial:
    """Makes the trial of the op `name` for B sequences of T tokens on a type of device."""
    spec, problem, ops = TRIALS[name](sizes)
    problem = {"B": B, "T": T, "M": (B, T), **problem}
    wide = WEIGHTS if sizes.narrow_residual else (*WEIGHTS, "residual")

    def make(*sizes: int, below: int = 0) -> Tensor:
        return torch.randint(below, sizes, device=on) if below else torch.randn(sizes, device=on)

    inputs = {
        key: x if key in wide or not x.is_floating_point() else x.to(DTYPES[sizes.precision])
        for key, x in spec.inputs(problem, make).items()
    }
    bound = {key: spec.call(op, problem, on) for key, op in ops.items()}
    return Trial(bound, inputs, spec.call(spec.ref, problem, on))


def _heads(model: ModelConfig) -> dict[str, int]:
    return {"H": model.num_heads, "K": model.kv_heads, "D": model.head_dim}


def _attention(sizes: Sizes) -> Tried:
    """Tries what the model calls: one tensor of q, k and v, or its three parts.

    Either way the gradient is one tensor again, which costs a concatenation of three.
    """
    model = sizes.model
    unfused = sizes.transformers or model.position == "rotary" or model.qk_norm
    problem = {
        **_heads(model),
        "scale": model.attention_scale,
        "window": model.window,
        "input_bias": not unfused and model.bias_at("qkv"),
        "docs": 2 * min(model.context, 1024) // 3 if model.document_mask else 0,  # their mean: half
    }
    ours = with_input_bias(tables.PACKED_ATTENTION["triton"])
    return SPECS["attention_packed"], problem, {
        "triton": packed(tables.ATTENTION["triton"]) if unfused else ours,
        "sdpa": packed(tables.ATTENTION["sdpa"]),
    }  # fmt: skip


def _norm(sizes: Sizes) -> Tried:
    model, norms = sizes.model, tables.NORMS
    summed = not sizes.transformers
    op = f"{'add_' * summed}{'layer_norm' if model.norm == 'layernorm' else 'rms_norm'}"
    fused = summed and norm_fuses_bias_grad(model, norms["triton"], "residual")
    problem = {
        "N": model.dim,
        "eps": model.epsilon,
        "without": () if model.bias else ("bias",),
        "input_bias": fused and model.bias_at("projection"),
    }
    ops = {name: with_input_bias(getattr(norms[name], op)) for name in ("triton", "torch")}
    return SPECS[op], problem, ops


def _loss(sizes: Sizes) -> Tried:
    model, spec = sizes.model, SPECS["linear_cross_entropy"]

    def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
        made = spec.inputs(s, make)
        return {**made, "weight": made["weight"] * model.dim**-0.5}  # logits of about 1

    options = {"valid_vocab": model.vocab_size, "softcap": model.softcap}
    problem = {"C": model.dim, "V": model.padded_vocab, "valid_vocab": model.vocab_size}
    ops = {name: tables.LOSS[name] for name in ("chunked", "torch")}
    return replace(spec, inputs=inputs, options=lambda *_: options), problem, ops


def _rotary(sizes: Sizes) -> Tried:
    H, K, D = _heads(sizes.model).values()

    def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
        q, k, _ = make(s["B"], s["T"], H + 2 * K, D).split((H, K, K), dim=2)  # as in the model
        return {"q": q, "k": k}

    ops = {name: tables.ROTARY[name] for name in ("triton", "torch")}
    return replace(SPECS["rotary"], inputs=inputs), _heads(sizes.model), ops


def _activation(sizes: Sizes) -> Tried:
    """Tries it with the matrix product before it, which adds PyTorch's bias at no cost."""
    model, kind = sizes.model, sizes.model.activation
    width = model.ffn_width * (2 if kind == "swiglu" else 1)
    halved = sizes.transformers and kind == "swiglu"  # two matrix products, without biases

    def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
        weight = make(width, model.dim) * model.dim**-0.5
        made = {"x": make(s["B"], s["T"], model.dim), "weight": weight}
        return {**made, "bias": make(width)} if model.bias else made

    def gate_and_up(x: Tensor, weight: Tensor) -> list[Tensor]:
        return [F.linear(x, half) for half in weight.chunk(2)]

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if halved:
            return bias_act(torch.cat(gate_and_up(x, weight), -1), None, kind)
        if sizes.transformers:
            return bias_act(F.linear(x, weight, bias), None, kind)
        return bias_act(F.linear(x, weight), bias, kind)

    def ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return ACTIVATIONS[kind](F.linear(x, weight, bias))

    def gated(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = gate_and_up(x, weight)
        return F.silu(gate) * up

    spec = replace(SPECS["bias_act"], inputs=inputs, options=no_options, ref=ref)
    return spec, {}, {"triton": ours, "torch": gated if halved else ref}


TRIALS: dict[str, Callable[[Sizes], Tried]] = {
    "attention": _attention,
    "norm": _norm,
    "loss": _loss,
    "rotary": _rotary,
    "activation": _activation,
}
