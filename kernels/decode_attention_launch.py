"""Decode attention's launcher: tile, number of splits, buffers; what is compiled ahead of time.

Shapes
    as in decode_attention_kernels
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.aot_compile import Case
from kernels.decode_attention_kernels import _decode_attention_kernel, _decode_combine_kernel
from kernels.runtime import INTERPRETING, arch, launch, multiprocessors

LOG2E = math.log2(math.e)
TILE_BYTES = 16 << 10
"""Of the keys of a block. Two blocks of keys and values are then in flight, 64 KB, and two programs
fit into an sm_80's 163 KB; 4.3 TB/s over 132 multiprocessors need 26 KB each to cover 800 ns."""
PROGRAMS = 2
"""On a multiprocessor at once."""
MAX_SPLITS = 128

# --- configurations -------------------------------------------------------------------------------


def tile(rows: int, D: int, itemsize: int, paged: bool, arch: int) -> dict[str, int]:
    """Block sizes, warps and stages; no table: all follows from what is in flight.

    Rows beyond 32 are another tile's, which reads the keys from L2. fp32, without tensor cores,
    spills with 32 rows, 32 keys, or 4 warps. Where the page must be read before its keys, two
    blocks in flight take five stages instead of three.
    """
    block_m = 16 if rows <= 16 or itemsize == 4 else 32
    if arch == 0:  # interpreted: small, so that short caches show splits
        return {"BLOCK_M": block_m, "BLOCK_N": 16}
    most = 16 if itemsize == 4 else 64 if D < 64 else 128
    block_n = max(16, min(most, TILE_BYTES // (_padded(D) * itemsize)))
    warps, stages = 8 if itemsize == 4 else 4, 5 if paged else 3
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


@functools.lru_cache(1024)
def splits(tiles: int, keys: int, block_n: int, slots: int) -> int:
    """Into how many parts the keys are cut.

    Programs run in waves of `slots`, and the last wave may be nearly empty: of the counts that fill
    their waves within 10 % of the best one, the least, since each split is written and read again.
    No split is shorter than two blocks. Depends on no length: those are the device's to know.

    Args:
        tiles: programs without splits.
        keys: Tmax.
        block_n: keys of a block.
        slots: programs that run at once.

    Returns:
        int: 1 to MAX_SPLITS.
    """
    most = max(1, min(MAX_SPLITS, keys // (2 * block_n)))

    def filled(count: int) -> float:
        waves = tiles * count / slots
        return waves / math.ceil(waves)

    best = max(map(filled, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if filled(n) >= 0.9 * best)


def _padded(D: int) -> int:
    return max(16, 1 << (D - 1).bit_length())


# --- launcher -------------------------------------------------------------------------------------


def decode_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    table: Tensor | None,
    scale: float,
) -> Tensor:
    """(B, Tq, H, D), contiguous; the arguments are those of `kernels.decode_attention`."""
    B, Tq, H, D = q.shape
    pages, page, K, _ = k.shape
    Tmax = page if table is None else table.shape[1] * page
    out = torch.empty((B, Tq, H, D), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if Tmax == 0 or pages == 0:
        return out.zero_()
    if INTERPRETING and q.dtype is torch.bfloat16:  # its bf16 products are wrong
        q, k, v = q.float(), k.float(), v.float()
        return decode_attention_fwd(q, k, v, lengths, starts, table, scale).bfloat16()
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    lengths = lengths.contiguous()
    starts, table = (None if x is None else x.contiguous() for x in (starts, table))
    rows = Tq * (H // K)
    config = tile(rows, D, q.element_size(), table is not None, arch(q.device))
    tiles = B * K * -(-rows // config["BLOCK_M"])
    count = splits(tiles, Tmax, config["BLOCK_N"], PROGRAMS * multiprocessors(q.device))
    parts, lse = out, None
    if count > 1:
        parts = torch.empty((B, Tq, H, count, D), dtype=torch.float32, device=q.device)
        lse = torch.empty((B, Tq, H, count), dtype=torch.float32, device=q.device)
    launch(
        _decode_attention_kernel, (tiles * count,),
        q, k, v, parts, lse, lengths, starts, table,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        Tq, Tmax, count, pages, 0 if table is None else table.shape[1], scale * LOG2E,
        H=H, GROUP=H // K, D=D, BLOCK_D=_padded(D), PAGE=0 if table is None else page,
        STARTS=starts is not None, SPLIT=count > 1, **config,
    )  # fmt: skip
    if lse is not None:
        launch(
            _decode_combine_kernel, (B * Tq * H,),
            parts, lse, out, count,
            D=D, BLOCK_D=_padded(D), MAX_SPLITS=MAX_SPLITS, BLOCK_S=16, num_warps=1,
        )  # fmt: skip
    return out


# --- what is compiled ahead of time ---------------------------------------------------------------


def aot_cases(arch: int) -> Iterator[Case]:
    """The tile of each head dimension and dtype in its forms: split or not, paged, with starts."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for D in (16, 64, 80, 128, 256):
        yield _case(D, bf16)
    yield _case(64, bf16, B=1, Tq=4, H=32, K=8)
    yield _case(256, fp32, B=1)
    for D, dtype in ((64, bf16), (128, bf16), (256, bf16), (64, fp32), (256, fp32)):
        yield _case(D, dtype, B=4, Tq=4, H=32, K=4, page=16, starts=True)


def _case(
    D: int, dtype: torch.dtype, *, B: int = 64, Tq: int = 1, H: int = 12, K: int = 12,
    page: int = 0, starts: bool = False,
) -> Case:  # fmt: skip
    T = 4096

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run() -> None:
        shape = (B * T // page, page, K, D) if page else (B, T, K, D)
        table = make(B, T // page, dtype=torch.int32) if page else None
        first = make(B, Tq, dtype=torch.int64) if starts else None
        lengths = make(B, dtype=torch.int64)
        q, k, v = make(B, Tq, H, D), make(*shape), make(*shape)
        decode_attention_fwd(q, k, v, lengths, first, table, D**-0.5)

    mma: dict[str, Any] = {} if dtype is torch.float32 else {"_decode_attention_kernel": "HMMA"}
    parts = [f"D={D} {str(dtype).removeprefix('torch.')} B={B} Tq={Tq} group={H // K}"]
    parts += [f"page={page}"] * bool(page) + ["starts"] * starts
    return Case(" ".join(parts), run, mma)
