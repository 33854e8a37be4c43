"""Weights of 8 bits, with which a CPU generates text faster, as it reads fewer bytes per token."""

import warnings
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError
from fastgpt.model.gpt import GPT
from fastgpt.model.layers import Projection


class Int8Linear(nn.Module):
    """Linear layer of int8 weights, a scale for each output, by PyTorch's FBGEMM.

    Inputs are rounded to 7 bits with one range for the whole tensor, since the sums of AVX2's
    products have no more room.
    """

    fused_bias = None  # as a `Projection` in evaluation

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight, zeros = weight.detach().float(), torch.zeros(len(weight), dtype=torch.long)
        scales = weight.abs().amax(1).clamp(min=1e-30) / 127
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(rounded, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x.float(), self.packed, reduce_range=True)


def to_int8(model: GPT) -> GPT:
    """Replaces the linear layers and the output head of a model on a CPU, in place.

    The embedding stays as it is. The model can generate and be scored, but not be trained.

    Raises:
        UserError: this build of PyTorch has no such products.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise UserError("int8 weights need FBGEMM, which this build of PyTorch lacks")
    table = model.wte if model.lm_head is None else model.lm_head
    products = Int8Linear(table.weight, getattr(table, "bias", None))
    model.lm_head, model.head = None, partial(_head, model.config, products)  # pyright: ignore
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Projection):
                setattr(module, name, Int8Linear(child.weight, child.bias))
    return model.eval()


def _head(config: ModelConfig, products: Int8Linear, x: Tensor, targets: Tensor | None) -> Tensor:
    logits = products(x)[..., : config.vocab_size]
    if config.softcap is not None:
        logits = config.softcap * torch.tanh(logits / config.softcap)
    return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
