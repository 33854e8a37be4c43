"""The ops of a GPT's step, one a file; `<op>_ref` is the plain form that the others are held to."""

from kernels.attention import attention, attention_packed, attention_ref
from kernels.attention_blocked import attention_blocked
from kernels.attention_dropout import attention_dropout_mask
from kernels.bias_act import bias_act
from kernels.cross_entropy import cross_entropy
from kernels.decode_attention import decode_attention
from kernels.dropout import dropout
from kernels.layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.rotary import rotary, rotary_ref

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_blocked",
    "attention_dropout_mask",
    "attention_packed",
    "attention_ref",
    "bias_act",
    "cross_entropy",
    "decode_attention",
    "dropout",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "rotary_ref",
]
