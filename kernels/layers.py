"""Layers for Hugging Face's `kernels`, which puts their `forward` into modules of a model.

`kernels.hub` builds the folder that is loaded, docs/kernels/hub.md says how. Such a layer has no
state: weights and eps belong to the module that gets the `forward`. Each has the name that
transformers gives the modules to replace; LayerNorm is torch.nn's.
"""

import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from .bias_act.op import bias_act
from .norm.op import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm of LLaMA, Qwen, Mistral and others; its result has the dtype of its input."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm, as GPT-2 has it; over several dimensions it stays PyTorch's."""

    can_torch_compile = True
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) > 1:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, self.weight, self.bias, self.eps)


class NewGELU(nn.Module):
    """GELU by tanh, as GPT-2 has it (`gelu_new`)."""

    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return bias_act(input, None, "gelu_tanh")


class GeluTanh(NewGELU):
    """GELU by tanh under its other name (`gelu_pytorch_tanh`)."""


class GeLU(nn.Module):
    """GELU by erf (`gelu`)."""

    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return bias_act(input, None, "gelu_erf")
