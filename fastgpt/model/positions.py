"""Position encodings, added to token embeddings or applied to q and k as rotations.

Shapes
    B batch, T tokens, C width, D head dim
    positions: a slice of T, the same for each row, or (B, T) int64
"""

import torch
from torch import Tensor, nn

from fastgpt.config.model import ModelConfig
from fastgpt.ops.dtensor import local


class LearnedPositions(nn.Module):
    """Adds a trained vector for each position to x (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.context, config.dim))  # as nn.Embedding

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        return x + local(self.weight)[positions]


class SinusoidalPositions(nn.Module):
    """Adds fixed sines, then cosines, to x (B, T, C): section 3.5 of Vaswani et al. 2017."""

    waves: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        angles = _angles(config.context, _frequencies(config.dim, 10_000.0))  # (context, C/2)
        self.register_buffer("waves", torch.cat((angles.sin(), angles.cos()), -1), persistent=False)

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        return x + self.waves[positions]


class Rotary(nn.Module):
    """Computes the cosines and sines of the angles by which queries and keys are rotated.

    Each is (T, D/2), or (B T, D/2) for positions (B, T), one row after the other.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        frequencies = _frequencies(config.head_dim, config.rotary_base)
        if config.rotary_scaling is not None:
            frequencies = _lowered(frequencies, *config.rotary_scaling)
        angles = _angles(config.context, frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: slice | Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions].flatten(0, -2), self.sin[positions].flatten(0, -2)


def _frequencies(width: int, base: float) -> Tensor:
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _lowered(frequencies: Tensor, factor: float, low: float, high: float, context: int) -> Tensor:
    """Divides frequencies with fewer than `low` turns in the context by `factor`, and those with
    more than `high` turns by 1; in between, the inverse of the divisor is interpolated.

    Llama 3.1's scaling: Grattafiori et al. 2024, "The Llama 3 Herd of Models", and its published
    code.
    """
    turns = context * frequencies / (2 * torch.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def _angles(T: int, frequencies: Tensor) -> Tensor:
    return torch.outer(torch.arange(T, dtype=torch.float64), frequencies).float()


POSITIONS = {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions}
"""Encodings that are added; others are not."""
