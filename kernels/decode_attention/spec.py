"""Spec of `decode_attention`."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..invariant import batch_invariant
from ..proof.compile import Variant
from ..spec import STRUCTURAL, Changes, Make, Problem, Spec, Work, meta
from .op import decode_attention, decode_attention_ref, visible_places, whole_cache

SPLIT, COMBINE = "_decode_attention_kernel", "_decode_combine_kernel"


def eager(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, starts: Tensor | None = None,
    block_table: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention by plain products and softmax in the inputs' dtype.

    Unused positions of the cache must be finite.
    """
    Tq, H, D = q.shape[1:]
    k, v = (whole_cache(x, block_table) for x in (k, v))
    hidden = ~visible_places(Tq, k.shape[1], lengths, starts)[:, None]
    if k.shape[2] != H:
        k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * (D**-0.5 if scale is None else scale)) @ k.transpose(2, 3)
    weights = scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)
    return (weights.masked_fill(hidden, 0) @ v).transpose(1, 2)


def widened(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, starts: Tensor | None = None,
    block_table: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention by PyTorch's fused op in fp32; on a CPU the model keeps its cache so."""
    k, v = (whole_cache(x, block_table) for x in (k, v))
    seen = visible_places(q.shape[1], k.shape[1], lengths, starts)[:, None]
    grouped = q.shape[2] != k.shape[2]
    wide = (x.transpose(1, 2).float() for x in (q, k, v))
    out = F.scaled_dot_product_attention(*wide, attn_mask=seen, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).to(q.dtype)


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    """Makes random queries (B, Tq, H, D) and caches of T positions, full without `lengths`.

    Positions that no query may use hold numbers so large that they would show in any result.
    """
    q = make(s["B"], s.get("Tq", 1), s["H"], s["D"])
    unused = unused_places(s).to(q.device)
    caches = [make(*unused.shape, s.get("K", s["H"]), s["D"]) for _ in "kv"]
    if "lengths" in s:
        lengths = torch.tensor(s["lengths"], dtype=torch.int64, device=q.device)
        for x in caches:
            x.masked_fill_(unused[..., None, None], 3e4)
    else:
        lengths = torch.full((s["B"],), s["T"], dtype=torch.int32, device=q.device)
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "lengths": lengths}


def options(s: Problem, device: torch.device | str) -> dict[str, Any]:
    """Makes the keyword arguments of a test problem: scale, cache pages, first positions.

    `page` cuts the caches into pages in shuffled order; with `starts` each query has its own start.
    """
    found = {"scale": s["scale"]} if "scale" in s else {}
    if s.get("page"):
        found["block_table"] = block_table(s).to(device)
    if s.get("starts"):
        generator = torch.Generator().manual_seed(0)
        Tq = s.get("Tq", 1)
        ends = torch.tensor(s["lengths"])[:, None] - Tq + torch.arange(Tq) + 1
        drawn = torch.rand(ends.shape, generator=generator)
        found["starts"] = (drawn * ends.clamp(min=0)).long().to(device)
    return found


def block_table(s: Problem) -> Tensor:
    """Makes the block table of a paged cache, (B, max_pages) int32, invalid where not needed."""
    each = -(-s["T"] // s["page"])
    order = torch.randperm(s["B"] * each + 1, generator=torch.Generator().manual_seed(0))
    table = order[:-1].view(s["B"], each)
    for b, length in enumerate(s["lengths"]):
        table[b, -(-length // s["page"]) :] = 10**6 * (-1) ** b
    return table.int()


def unused_places(s: Problem) -> Tensor:
    """Builds the mask of cache positions that no query may use: bool (B, T) or (pages, page)."""
    B, T, page = s["B"], s["T"], s.get("page")
    lengths = s.get("lengths", (T,) * B)
    if not page:
        return torch.arange(T) >= torch.tensor(lengths, dtype=torch.int64)[:, None]
    each = -(-T // page)
    unused = torch.ones(s.get("pages", B * each + 1), page, dtype=torch.bool)
    for b, pages in enumerate(block_table(s).tolist()):
        for i, n in enumerate(pages):
            if 0 <= n < len(unused):
                unused[n, : max(0, lengths[b] - i * page)] = False
    return unused


def flops_and_bytes(s: Problem, itemsize: int) -> Work:
    """Counts FLOPs and bytes of one query per head over its cache, which is read once."""
    B, T, H, D = s["B"], s["T"], s["H"], s["D"]
    return {"fwd": (4 * B * H * T * D, 2 * B * H * D * (T + 1) * itemsize)}


def variants(arch: int) -> Iterator[Variant]:
    """Yields the kernel variants to compile: head dimensions, dtypes, split and paged caches."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for D in (16, 64, 80, 128, 256):
        yield variant(D, bf16)
    yield variant(64, bf16, B=1, Tq=4, H=32, K=8)
    yield variant(256, fp32, B=1)
    for D, dtype in ((64, bf16), (128, bf16), (256, bf16), (64, fp32), (256, fp32)):
        yield variant(D, dtype, B=4, Tq=4, H=32, K=4, page=16, starts=True)
    yield variant(64, bf16, invariant=True)
    yield variant(64, fp32, invariant=True, starts=True)


def variant(
    D: int, dtype: torch.dtype, *, B: int = 64, Tq: int = 1, H: int = 12, K: int = 12,
    page: int = 0, starts: bool = False, invariant: bool = False,
) -> Variant:  # fmt: skip
    T = 4096

    def run() -> None:
        shape = (B * T // page, page, K, D) if page else (B, T, K, D)
        table = meta(B, T // page, dtype=torch.int32) if page else None
        first = meta(B, Tq, dtype=torch.int64) if starts else None
        lengths = meta(B, dtype=torch.int64)
        q, k, v = (meta(*sizes, dtype=dtype) for sizes in ((B, Tq, H, D), shape, shape))
        with batch_invariant(invariant):
            decode_attention(q, k, v, lengths, starts=first, block_table=table)

    mma: dict[str, Any] = {} if dtype is torch.float32 else {SPLIT: "HMMA"}
    parts = [f"D={D} {str(dtype).removeprefix('torch.')} B={B} Tq={Tq} group={H // K}"]
    parts += [f"page={page}"] * bool(page) + ["starts"] * starts + ["invariant"] * invariant
    return Variant(" ".join(parts), run, mma)


def problem(T: int, H: int, D: int, lengths: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"B": len(lengths), "T": T, "H": H, "D": D, "lengths": lengths, **more}


def full(B: int, T: int, H: int, D: int) -> dict[str, int]:
    return {"B": B, "T": T, "H": H, "D": D}


def grown(T: int, *lengths: int) -> dict[str, Any]:
    return {"B": len(lengths), "T": T, "lengths": lengths}


# Interpreted tiles are 16 rows (32 in fp16) x 16 keys; two blocks or more make a split.
BORDERS = problem(33, 1, 16, (15, 16, 17, 31, 32, 33))
THREE = problem(50, 6, 16, (50, 17, 2), Tq=3, K=2)
FOUR = problem(130, 4, 16, (130, 64, 3, 4), Tq=4, K=1)
TWO_ROW_TILES = problem(70, 16, 16, (70, 33, 0), Tq=5, K=2)
SPLITS = problem(257, 2, 16, (257, 129, 0), K=1)
NOTHING = problem(40, 2, 16, (0, 0), Tq=2, K=1)
STARTS, PAGES = {"starts": True}, {"page": 5}
DECODE_ATTENTION = Spec(
    name="decode_attention",
    op=decode_attention,
    ref=decode_attention_ref,
    eager=eager,
    cpu=widened,
    inputs=inputs,
    options=options,
    launches=lambda s: (SPLIT,),  # COMBINE too, where there are several splits
    variants=variants,
    work=flops_and_bytes,
    terms=lambda s: s["D"],  # in fp32 a score is one chain of multiply-adds
    problems={
        "three-heads": problem(40, 6, 16, (40, 17, 1), Tq=4, K=3, **STRUCTURAL),
        "pages-and-starts": problem(9, 6, 16, (9, 2), Tq=4, K=3, page=7, **STARTS, **STRUCTURAL),
        "full": full(2, 40, 2, 16),
        "one-place": problem(1, 2, 16, (1, 0)),
        "nothing-yet": NOTHING,
        "nothing-yet-pages": {**NOTHING, **PAGES},
        "borders": BORDERS,
        "borders-pages": {**BORDERS, "page": 16},
        "borders-starts": {**BORDERS, **STARTS},
        "odd": problem(70, 3, 20, (70, 1, 37)),
        "odd-pages": problem(70, 3, 20, (70, 1, 37), **PAGES),
        "two-new": problem(70, 2, 16, (2, 1, 65), Tq=2),
        "three-new": THREE,
        "three-new-pages": {**THREE, **PAGES},
        "four-new": FOUR,
        "four-new-starts": {**FOUR, **STARTS},
        "four-new-pages-and-starts": {**FOUR, **STARTS, "page": 7},
        "scale": {**FOUR, "scale": 0.7},
        "negative-scale": {**FOUR, "scale": -0.4},
        "zero-scale": {**FOUR, "scale": 0.0},
        "two-tiles-of-rows": TWO_ROW_TILES,
        "two-tiles-of-rows-pages": {**TWO_ROW_TILES, "page": 16},
        "two-tiles-of-rows-starts": {**TWO_ROW_TILES, **STARTS},
        "splits": SPLITS,
        "splits-pages": {**SPLITS, "page": 16},
        "splits-pages-and-starts": {**SPLITS, **STARTS, "page": 7},
        "short-in-a-long-cache": problem(257, 1, 16, (5,), Tq=2),
        "head-of-64": problem(65, 4, 64, (65, 20), K=2),
        "head-of-80": problem(65, 1, 80, (65, 16), Tq=2),
        "head-of-1": problem(20, 2, 1, (20, 3), K=1),
        "head-of-256": problem(20, 2, 256, (20,), K=1),
        "head-of-256-pages": problem(20, 2, 256, (20,), K=1, **PAGES),
    },
    sizes={
        "cuda": {
            "b64-1k": full(64, 1024, 12, 64),
            "b1-16k": full(1, 16384, 12, 64),
            "b16-4k": full(16, 4096, 12, 64),
            "b8-16k-d128": full(8, 16384, 16, 128),
            "awkward": full(3, 1001, 7, 80),
        },
        "cpu": {"b4-1k": full(4, 1024, 12, 64)},
    },
    changes=Changes(
        growing=(
            *(grown(270, 20, 3), grown(301, 5, 6, 0, 31, 17)),
            *(grown(258, 33, 4), grown(290, 1, 2, 40)),
            *({**grown(4096, 5), "Tq": 1}, {**grown(4097, *range(16)), "Tq": 1}),
        ),
        empty=(grown(9), {"Tq": 0}, {"H": 0}, grown(0, 0), {"page": 4, "pages": 0}),
        far=({}, grown(9, 9)),  # three sequences; three heads, or pages of 7
    ),
)
SPECS = (DECODE_ATTENTION,)
