"""Layers of which the blocks of a model are built: dropout, projections and norms."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt.config.model import ModelConfig
from fastgpt.ops.dtensor import embedding, linear, local
from fastgpt.ops.protocols import Norms, Ops


class Dropout(nn.Module):
    """Dropout with probability p in training; the identity in evaluation or if p is 0."""

    def __init__(self, p: float, ops: Ops) -> None:
        super().__init__()
        self.p, self.ops = p, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.dropout(x, self.p) if self.training and self.p else x


class Embedding(nn.Embedding):
    """Embedding of tokens, of whose vocabulary each tensor-parallel rank has a part."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)


class Projection(nn.Linear):
    """Linear layer whose bias may get its gradient from the op that takes the output.

    That op adds up the columns of the output's gradient while it computes it, which saves a pass
    over it. In training `fused_bias` is the bias to hand to it, as its argument `input_bias`, and
    the output is computed from a detached copy; it is None where autograd does the work as usual.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, fuses_bias_grad: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.fuses_bias_grad = bias and fuses_bias_grad

    @property
    def fused_bias(self) -> Tensor | None:
        return local(self.bias) if self.fuses_bias_grad and self.training else None

    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias if self.fused_bias is None else self.fused_bias.detach()
        return linear(input, self.weight, bias)


def norm_fuses_bias_grad(config: ModelConfig, norms: Norms, place: str) -> bool:
    """Returns True if the output of a `Projection` goes straight to a norm that takes its bias."""
    undropped = config.dropout_at(place) == 0
    return norms.fuses_bias_grad and undropped and config.architecture == "gpt"


class Residual(NamedTuple):
    """Residual stream, and a bias of the branch whose gradient the next norm computes."""

    stream: Tensor
    fused_bias: Tensor | None
    """See `Projection`."""


class LayerNorm(nn.Module):
    """LayerNorm with the residual sum before it: returns (norm(x + residual), x + residual).

    Without a residual, x stands for the sum.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps = ops, config.epsilon
        self.weight = nn.Parameter(torch.ones(config.dim))
        self.bias = nn.Parameter(torch.zeros(config.dim)) if config.bias else None

    def forward(self, x: Tensor, residual: Residual | None) -> tuple[Tensor, Tensor]:
        weight, bias = local(self.weight), local(self.bias)
        if residual is None:
            return self.ops.norms.layer_norm(x, weight, bias, self.eps), x
        stream, fused_bias = residual
        return self.ops.norms.add_layer_norm(
            x, stream, weight, bias, self.eps, input_bias=fused_bias
        )


class RMSNorm(nn.Module):
    """RMSNorm with the residual sum before it, called like `LayerNorm`; it has no bias."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps = ops, config.epsilon
        self.weight = nn.Parameter(torch.ones(config.dim))

    def forward(self, x: Tensor, residual: Residual | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.ops.norms.rms_norm(x, local(self.weight), self.eps), x
        stream, fused_bias = residual
        weight = local(self.weight)
        return self.ops.norms.add_rms_norm(x, stream, weight, self.eps, input_bias=fused_bias)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


class HeadNorm(nn.RMSNorm):
    """RMSNorm of heads, of which each tensor-parallel rank has some."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else local(self.weight, partial=True)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def head_norm(config: ModelConfig) -> HeadNorm | None:
    """Builds the normalisation of the queries or keys of each head, if there is one."""
    eps = 1e-6 if config.norm_eps is None else config.norm_eps
    weighted = config.qk_norm_weight
    return HeadNorm(config.head_dim, eps, weighted) if config.qk_norm else None


def normalised(norm: HeadNorm, x: Tensor) -> Tensor:
    """Normalises x (..., D) in the dtype of the weights, if there are any; the result has x's."""
    # x and weights of two dtypes, as under autocast, have no fused kernel; autocast may use fp32
    return norm(x if norm.weight is None else x.to(norm.weight.dtype)).type_as(x)
