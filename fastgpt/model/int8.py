"""Weights of 8 bits, with which a CPU generates text faster, as it reads fewer bytes per token."""

import warnings

import torch
from torch import Tensor, nn

from fastgpt.errors import UserError
from fastgpt.model.gpt import GPT
from fastgpt.model.layers import Projection


class Int8Linear(nn.Module):
    """Linear layer of int8 weights with a scale for each output, by PyTorch's FBGEMM.

    Inputs are rounded to 7 bits with one range per call: AVX2's sums have no more room.
    """

    fused_bias = None  # as a `Projection` in evaluation

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight, zeros = weight.detach(), torch.zeros(len(weight), dtype=torch.long)
        scales = weight.abs().amax(1).clamp(min=1e-30) / 127
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(rounded, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x.float(), self.packed, reduce_range=True)


def to_int8(model: GPT, *, exact: bool = False) -> GPT:
    """Changes an fp32 model on a CPU in place, embeddings aside; it then gives logits alone.

    Raises:
        UserError: the model is elsewhere, PyTorch lacks FBGEMM, or texts are to be `exact`, that is
            independent of the others of a batch, with which their activations share a range.
    """
    if (kind := next(model.parameters()).device.type) != "cpu":
        raise UserError(f"--weights is int8: expected --device cpu, not {kind}")
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise UserError("--weights is int8, which needs FBGEMM: this build of PyTorch lacks it")
    if exact:
        raise UserError("--weights is int8: expected no --exact, which it cannot give")
    table, config = model.wte if model.lm_head is None else model.lm_head, model.config
    last = Int8Linear(table.weight, getattr(table, "bias", None))

    def head(x: Tensor, _: None) -> Tensor:
        logits, cap = last(x)[..., : config.vocab_size], config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    model.head, model.lm_head = head, None  # pyright: ignore[reportAttributeAccessIssue]
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, Projection):
                setattr(module, name, Int8Linear(child.weight, child.bias))
    return model.eval()
