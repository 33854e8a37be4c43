"""The ops of a GPT's step, one a file; `<op>_ref` is the plain form that the others are held to."""

from kernels.attention import attention_ref
from kernels.attention_blocked import attention_blocked
from kernels.dropout import dropout

__all__ = ["attention_blocked", "attention_ref", "dropout"]
