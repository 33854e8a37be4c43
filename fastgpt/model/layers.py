"""Layers of which the blocks of a model are built: dropout, projections and norms."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt.config.model import ModelConfig
from fastgpt.ops.dtensor import embedding, linear, local
from fastgpt.ops.protocols import Ops


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
    """Linear layer; with `skip_bias_add` the next op adds the bias, `skipped_bias`, instead.

    That op computes the bias's gradient together with the output's: no pass of its own is needed.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, skip_bias_add: bool = False
    ) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.skip_bias_add = skip_bias_add

    @property
    def skipped_bias(self) -> Tensor | None:
        return local(self.bias) if self.skip_bias_add else None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, None if self.skip_bias_add else self.bias)


class Residual(NamedTuple):
    """Residual stream, and the bias that the projection before it left out."""

    stream: Tensor
    x_bias: Tensor | None
    """See `Projection`."""


class Norm(nn.Module):
    """LayerNorm or RMSNorm with the residual sum before it.

    Returns (norm(sum), sum), the sum of x, its bias and the residual stream; without a residual,
    x stands for the sum.
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
        stream, x_bias = residual
        return add_norm(x, stream, *parameters, self.eps, x_bias=x_bias)


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
