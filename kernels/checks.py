"""What the public ops check of their arguments before anything is launched."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""That kernels take; all of them compute in fp32."""
INTEGERS = (torch.int32, torch.int64)
MAX_D = 256
"""The largest head dimension."""


def check_like(
    name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], q: Tensor
) -> None:
    """Raises ValueError unless x, called `name`, has this shape, one of `dtypes`, q's device."""
    if x.shape != shape:
        raise ValueError(f"{name}: expected {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: expected {expected}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name}: expected {q.device} as q, got {x.device}")
