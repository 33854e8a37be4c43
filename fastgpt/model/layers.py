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
    """Returns True if the norm after a `Projection` also computes the gradient of its bias."""
    undropped = config.dropout_at(place) == 0
    return norms.fuses_bias_grad and undropped and config.is_gpt


class Residual(NamedTuple):
    """Residual stream, and a bias of the branch whose gradient the next norm computes."""

    stream: Tensor
    fused_bias: Tensor | None
    """See `Projection`."""


class Norm(nn.Module):
    """LayerNorm or RMSNorm with the residual sum before it.

    Returns (norm(x + residual), x + residual); without a residual, x stands for the sum.
    """

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps, self.kind = ops, config.epsilon, config.norm_kind
        self.weight = nn.Parameter(torch.ones(config.dim))
        if self.kind == "layernorm":
            self.bias = nn.Parameter(torch.zeros(config.dim)) if config.bias_at("mlp") else None

    def forward(self, x: Tensor, residual: Residual | None) -> tuple[Tensor, Tensor]:
        norms, weight = self.ops.norms, local(self.weight)
        norm, add_norm, parameters = norms.rms_norm, norms.add_rms_norm, (weight,)
        if self.kind == "layernorm":
            norm, add_norm = norms.layer_norm, norms.add_layer_norm
            parameters = weight, local(self.bias)
        if residual is None:
            return norm(x, *parameters, self.eps), x
        stream, fused_bias = residual
        return add_norm(x, stream, *parameters, self.eps, input_bias=fused_bias)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of heads (..., D), of which each tensor-parallel rank has some; it keeps their dtype.

    It computes in the dtype of the weights, if there are any: two dtypes, as under autocast, have
    no fused kernel.
    """

    def __init__(self, config: ModelConfig) -> None:
        eps = 1e-6 if config.norm_eps is None else config.norm_eps
        super().__init__(config.head_dim, eps, config.qk_norm == "weighted")

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else local(self.weight, partial=True)
        given = x if weight is None else x.to(weight.dtype)
        y = F.rms_norm(given, self.normalized_shape, weight, self.eps)
        return y.type_as(x)  # autocast may use fp32
