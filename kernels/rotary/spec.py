"""Spec of `rotary`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..proof.compile import Variant
from ..spec import Changes, Make, Problem, Spec, Work, meta, work
from .cpu import rotary_plain
from .op import rotary, rotary_bwd, rotary_fwd, rotary_ref

KERNEL = "_rotary_kernel"


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        c, s = (torch.cat((t, t), -1)[:, None].to(x.dtype) for t in (cos, sin))
        a, b = x.chunk(2, dim=-1)
        return x * c + torch.cat((-b, a), -1) * s

    return turn(q), turn(k)


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    """Makes random queries (B, T, H, D) and keys (B, T, K, D); K is H where it is not given."""
    heads = {"q": s["H"], "k": s.get("K", s["H"])}
    return {name: make(s["B"], s["T"], n, s["D"]) for name, n in heads.items()}


def options(s: Problem, device: torch.device | str) -> dict[str, Tensor]:
    """Makes the angles of GPT-NeoX, from position 1 on, because position 0 has no rotation."""
    frequencies = 10_000.0 ** (-torch.arange(0, s["D"], 2, device=device) / s["D"])
    angles = torch.outer(torch.arange(1, s["T"] + 1, device=device), frequencies)
    return {"cos": angles.cos(), "sin": angles.sin()}


def bytes_moved(s: Problem, itemsize: int) -> Work:
    """Counts the bytes moved: q and k, read and written rotated; the same for their gradients."""
    n = s["B"] * s["T"] * (s["H"] + s.get("K", s["H"])) * s["D"] * itemsize
    return work((0, 2 * n), (0, 2 * n))


def variants(arch: int) -> Iterator[Variant]:
    """Yields the kernel variants to compile: GPTs' head dimensions, the largest one, and 80."""
    for D in (64, 128):
        for backward in (False, True):
            yield variant(12, 12, D, torch.bfloat16, conjugate=backward)
    yield variant(12, 4, 80, torch.float16)
    yield variant(8, 1, 256, torch.float32)


def variant(H: int, K: int, D: int, dtype: torch.dtype, *, conjugate: bool = False) -> Variant:
    def run() -> None:
        q, k, _ = meta(4, 1024, H + 2 * K, D, dtype=dtype).split((H, K, K), dim=2)
        cos = meta(1024, D // 2)
        rotary_bwd(cos, cos, q, k) if conjugate else rotary_fwd(q, k, cos, cos)

    label = f"H={H} K={K} D={D} {str(dtype).removeprefix('torch.')}"
    return Variant(f"{label} conjugate" if conjugate else label, run)


def shape(B: int, T: int, H: int, K: int, D: int) -> Problem:
    return {"B": B, "T": T, "H": H, "K": K, "D": D}


ROTARY = Spec(
    name="rotary",
    op=rotary,
    ref=rotary_ref,
    eager=eager,
    cpu=rotary_plain,
    inputs=inputs,
    options=options,
    launches=lambda s: (KERNEL,),
    variants=variants,
    work=bytes_moved,
    problems={
        # all sizes differ: torch.compile assumes that equal sizes stay equal
        "grouped": shape(2, 5, 6, 3, 16),
        "one-of-each": shape(1, 1, 1, 1, 2),
        "odd-numbers": shape(3, 5, 3, 3, 10),
        "tokens-in-parts": shape(2, 21, 5, 1, 64),
        "heads-of-80": shape(1, 9, 2, 2, 80),
        "heads-of-256": shape(1, 3, 1, 1, 256),
    },
    sizes={
        "cuda": {
            "gpt2-124m": {"B": 16, "T": 1024, "H": 12, "D": 64},
            "4k-d128": {"B": 4, "T": 4096, "H": 16, "D": 128},
            "16k-d64": {"B": 1, "T": 16384, "H": 16, "D": 64},
        },
        "cpu": {"gpt2-124m": {"B": 1, "T": 1024, "H": 12, "D": 64}},
    },
    changes=Changes(
        growing=tuple(
            {"B": B, "T": T}
            for B, T in ((2, 5), (3, 7), (4, 8), (5, 9), (1, 1), (3, 16), (2, 1001))
        ),
        empty=({"B": 0}, {"T": 0}),
        far=(shape(3, 1, 1, 1, 16), shape(1, 3, 1, 1, 16), shape(1, 1, 3, 3, 16)),
    ),
)
SPECS = (ROTARY,)
