"""What the public ops check of their arguments before anything is launched."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The floating dtypes that kernels take; all kernels compute in fp32."""
INTEGERS = (torch.int32, torch.int64)
MAX_D = 256
"""The largest head dimension."""


def check_like(
    name: str,
    x: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    like: Tensor,
    called: str = "q",
) -> None:
    """Raises ValueError unless x has this shape, one of `dtypes` and the device of another tensor.

    Args:
        name: that x has in the message.
        x: what is checked.
        shape: expected.
        dtypes: expected.
        like: on whose device x is expected.
        called: the name of `like`.
    """
    if x.shape != shape:
        raise ValueError(f"{name}: expected {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        by_name = " or ".join(str(dtype) for dtype in dtypes)
        expected = "fp32, fp16 or bf16" if dtypes is DTYPES else by_name
        raise ValueError(f"{name}: expected {expected}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected {like.device} as {called}, got {x.device}")


def check_float(
    name: str, x: Tensor, shape: tuple[int, ...] | None = None, like: Tensor | None = None
) -> None:
    """Raises ValueError unless x is fp32, fp16 or bf16, of `shape`, on the device of `like`.

    `like` is the op's first argument, called x. For that one the dtype alone is checked: give
    neither a shape nor `like`.
    """
    shape = x.shape if shape is None else shape
    check_like(name, x, shape, DTYPES, x if like is None else like, called="x")
