"""Argument checks of the public ops, made before any kernel is launched."""

import math

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Floating dtypes that the kernels accept; all kernels compute in fp32."""
INTEGERS = (torch.int32, torch.int64)
MAX_D = 256
"""Largest head dimension that the attention kernels accept."""


def padded(D: int) -> int:
    """Returns the width of a tile for rows of D numbers: a power of two, at least 16."""
    return max(16, 1 << (D - 1).bit_length())


def check_like(
    name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor,
    called: str = "q",
) -> None:  # fmt: skip
    """Raises ValueError unless x has this shape, one of `dtypes` and the device of `like`.

    The messages call x `name`, and the other tensor `called`.
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

    `like` is the op's first argument, called x. To check x itself, whose dtype alone matters, pass
    neither a shape nor `like`.
    """
    shape = x.shape if shape is None else shape
    check_like(name, x, shape, DTYPES, x if like is None else like, called="x")


def check_head(name: str, x: Tensor) -> None:
    """Raises ValueError unless the kernels accept the dtype and head dimension of x (..., D)."""
    check_float(name, x)
    if not 1 <= x.shape[-1] <= MAX_D:
        raise ValueError(f"{name}: expected a head dimension from 1 to {MAX_D}, got {x.shape[-1]}")


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v"), paged: bool = False
) -> None:
    """Raises ValueError unless keys and values fit the queries.

    Args:
        q: (B, Tq, H, D).
        k: (B, Tk, K, D) like q, where K divides H.
        v: shape of `k`.
        names: how the messages call k and v.
        paged: k and v are (pages, page, K, D) instead.
    """
    if q.dim() != 4:
        raise ValueError(f"q: expected (B, Tq, H, D), got {tuple(q.shape)}")
    B, _, H, D = q.shape
    for name, x in zip(names, (k, v), strict=True):
        if x.dim() != 4 or x.shape[3] != D or x.shape != k.shape or not (paged or len(x) == B):
            # formatted only here: torch.compile specialises on a size that becomes text
            first = "pages, page" if paged else f"{B}, Tk"
            raise ValueError(
                f"{name}: expected ({first}, K, {D}) for q {tuple(q.shape)}, the same in "
                f"{' and '.join(names)}, got {tuple(x.shape)}{_heads_first(q, k, paged)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name}: expected {q.dtype} on {q.device} as q, got {x.dtype} on {x.device}"
            )
    if k.shape[2] == 0 or H % k.shape[2]:
        raise ValueError(
            f"q: expected a number of heads that {k.shape[2]} divides, got {H}"
            f"{_heads_first(q, k, paged)}"
        )


def _heads_first(q: Tensor, k: Tensor, paged: bool) -> str:
    """Returns a hint, where q and k would fit if their heads came before their tokens."""
    if paged or k.dim() != 4 or q.shape[::3] != k.shape[::3]:
        return ""
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return ""
    return (
        "; these look like (B, H, T, D), PyTorch's layout: pass x.transpose(1, 2), or call"
        " kernels.scaled_dot_product_attention"
    )


def check_scale(scale: float | None) -> None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
