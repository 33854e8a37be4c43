"""Trials of `fastgpt.autotune.choose`: our ops beside PyTorch's, with inputs of the run's sizes.

Inputs and references come from each op's `Spec`; this module adds the options of the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.config.model import ModelConfig
from fastgpt.kernels import bias_act, parity
from fastgpt.kernels.attention.spec import packed
from fastgpt.kernels.bias_act.op import ACTIVATIONS
from fastgpt.kernels.spec import Problem, with_input_bias
from fastgpt.kernels.specs import SPECS
from fastgpt.model.layers import norm_fuses_bias_grad
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


@dataclass(frozen=True, slots=True)
class Trial:
    """Two implementations of the same computation, of which the faster one is chosen."""

    ops: Mapping[str, parity.Op]
    """By name: ours, which is chosen if both are equally fast, and PyTorch's."""
    inputs: Inputs
    ref: parity.Op
    """Reference by which ours is checked."""
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


def _attention(sizes: Sizes, on: str, dtype: torch.dtype) -> Trial:
    """Makes the trial of what the model calls: one tensor of q, k and v, or its three parts.

    Either way the gradient is one tensor again, which costs a concatenation of three.
    """
    model = sizes.model
    apart = sizes.transformers or model.position == "rotary" or model.qk_norm
    biased = not apart and model.bias_at("qkv")

    def with_options(op: Callable[..., Tensor]) -> parity.Op:
        def run(qkv: Tensor, *bias: Tensor) -> Tensor:
            ids, (B, T) = None, qkv.shape[:2]
            if model.document_mask:  # three documents in each row
                ids = (torch.arange(T, device=on) * 3 // T).expand(B, T).contiguous()
            return op(
                qkv, *bias, heads=model.num_heads, input_bias=biased, doc_ids=ids,
                scale=model.attention_scale, window=model.window,
            )  # fmt: skip

        return run

    ours = with_input_bias(tables.PACKED_ATTENTION["triton"])
    both = {
        "triton": packed(tables.ATTENTION["triton"]) if apart else ours,
        "sdpa": packed(tables.ATTENTION["sdpa"]),
    }
    ops = {name: with_options(op) for name, op in both.items()}
    ref = with_options(packed(SPECS["attention"].ref))
    return Trial(ops, _projected(model, on, dtype, biased=biased), ref)


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


TRIALS = {
    "attention": _attention,
    "norm": _norm,
    "loss": _loss,
    "rotary": _rotary,
    "activation": _activation,
}
"""The trial of each op, made from sizes, the type of device and the dtype of the activations."""
