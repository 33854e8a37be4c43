"""Specs of `attention` and `attention_packed`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..proof.compile import Variant
from ..runtime import recording
from ..spec import STRUCTURAL, Changes, Make, Problem, Spec, Work, meta, step, work
from .cpu import attention_blocked
from .dropout import attention_dropout_mask
from .op import attention, attention_packed
from .plain import attention_mask, attention_seeded_ref

FWD, DQ, DKV = "_attention_fwd_kernel", "_attention_bwd_dq_kernel", "_attention_bwd_dkv_kernel"
PRODUCTS = {FWD: 2, DQ: 3, DKV: 4}
"""Matrix products of each kernel; the backward's compute the weights again."""
SEED = -(2**40) - 3

# --- the op ---------------------------------------------------------------------------------------


def eager(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    window: int | None = None, dropout_p: float = 0.0, dropout_seed: int = SEED,
    dropout_mask: Tensor | None = None, doc_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention by plain products and softmax in the inputs' own dtype."""
    (_, Tq, H, D), (Tk, K) = q.shape, k.shape[1:3]
    if H != K:
        k, v = (x.repeat_interleave(H // K, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = attention_mask(Tq, Tk, causal=causal, window=window, doc_ids=doc_ids, device=q.device)
    scores = (q * (D**-0.5 if scale is None else scale)) @ k.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min)
    weights = scores.softmax(-1)
    if mask is not None and Tq > Tk:  # some queries see no key
        weights = weights.masked_fill(~mask, 0)
    if dropout_p:
        if dropout_mask is None:
            dropout_mask = attention_dropout_mask(weights.shape, dropout_p, dropout_seed, q.device)
        weights = weights * (dropout_mask / (1 - dropout_p)).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    """Makes random q (B, T, H, D), k and v (B, Tk, K, D); by default Tk is T and K is H."""
    B, T, H, D = s["B"], s["T"], s["H"], s["D"]
    keys = (B, s.get("Tk", T), s.get("K", H), D)
    return {"q": make(B, T, H, D), "k": make(*keys), "v": make(*keys)}


def options(s: Problem, device: torch.device | str) -> dict[str, Any]:
    """Makes the keyword arguments of a test problem: masks, scale and dropout.

    `docs` gives documents of (docs + 1) / 2 tokens on average.
    """
    found = {name: s[name] for name in ("causal", "scale", "window", "dropout_p") if name in s}
    if s.get("docs"):
        found["doc_ids"] = (3 * documents(s) - 5).to(device, torch.int32)  # with gaps
    return {**found, "dropout_seed": SEED} if "dropout_p" in s else found


def documents(s: Problem) -> Tensor:
    """Draws where documents begin, and returns the number of each token's: int64 (B, Tk).

    The last sequence has the documents that it has alone, as the bench may check it alone.
    """
    drawn = torch.rand(s["B"], s.get("Tk", s["T"]), generator=torch.Generator().manual_seed(0))
    return (drawn.flip(0) < 2 / (s["docs"] + 1)).cumsum(1)


def flops_and_bytes(s: Problem, itemsize: int) -> Work:
    """Counts FLOPs and bytes: q, k, v to the output and a number per query; and to the gradients.

    FLOPs are counted in the usual way: 4 B H T^2 D forward, of each document, halved where causal,
    and 2.5 times that backward.
    """
    B, T, H, D = s["B"], s["T"], s["H"], s["D"]
    squares = B * T * T
    if s.get("docs"):
        squares = sum(int(ids.unique(return_counts=True)[1].square().sum()) for ids in documents(s))
    flops = 4 * squares * H * D / (2 if s.get("causal", True) else 1)
    queries, keys = B * T * H * D * itemsize, B * T * s.get("K", H) * D * itemsize
    read, lse = queries + 2 * keys, 4 * B * T * H
    return work((flops, read + queries + lse), (2.5 * flops, 2 * read + 2 * queries + lse))


# --- the packed op --------------------------------------------------------------------------------


def packed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns an op on one tensor that holds q, k and v, which applies `f` to its three slices."""

    def of_slices(qkv: Tensor, heads: int, **options: Any) -> Tensor:
        K = (qkv.shape[2] - heads) // 2
        return f(*qkv.split((heads, K, K), dim=2), **options)

    return of_slices


def packed_inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    heads = s["H"] + 2 * s.get("K", s["H"])
    return {"qkv": make(s["B"], s["T"], heads, s["D"])}


def packed_options(s: Problem, device: torch.device | str) -> dict[str, Any]:
    return {"heads": s["H"], **options(s, device)}


# --- what is compiled ahead of time ---------------------------------------------------------------

MASKS = ("causal", "full", "docs window dropout grouped")
SHAPES = {
    16: (16, 1024, 48),
    32: (16, 1024, 24),
    64: (16, 1024, 12),
    128: (4, 4096, 16),
    256: (4, 4096, 8),
}
"""Sizes (B, T, H) by head dimension, at which configurations are ranked and timed."""
WINDOW, GROUP, DROPOUT = 256, 4, 0.1
STEPS = {"fwd": (FWD, "BLOCK_M"), "dq": (DQ, "BLOCK_M"), "dkv": (DKV, "BLOCK_N")}
"""Kernel of each step (`fwd`, `dq`, `dkv`), and the block size that is the M of its matmuls."""


def variants(arch: int) -> Iterator[Variant]:
    """Yields the kernel variants to compile: every row of the architecture's table.

    A row whose `plain` is false gets all masks at once.
    """
    for D in (32, 64, 128, 256):
        for masks in MASKS if D in (64, 128) else MASKS[::2]:
            yield variant(arch, D, torch.bfloat16, masks)
    yield variant(arch, 16, torch.bfloat16, MASKS[2])
    yield variant(arch, 80, torch.bfloat16, "causal")
    for D in (64, 128, 256):  # 16 and 32 have the row of 64
        for masks in MASKS[::2]:
            yield variant(arch, D, torch.float32, masks)


def variant(arch: int, D: int, dtype: torch.dtype, masks: str) -> Variant:
    """Builds the `Variant` that launches all three kernels with the masks named."""
    B, T, H = 16, 1024, 12  # GPT-2's sizes; only the heads are compiled in
    K = H // 3 if "grouped" in masks else H
    given = {
        "heads": H,
        "causal": masks == "causal",
        "window": WINDOW if "window" in masks else None,
        "dropout_p": DROPOUT if "dropout" in masks else 0.0,
        "dropout_seed": SEED,
    }

    def run() -> None:
        docs = meta(B, T, dtype=torch.int32) if "docs" in masks else None
        step(attention_packed, meta(B, T, H + 2 * K, D, dtype=dtype), doc_ids=docs, **given)

    mma = {}
    with recording(arch) as launches:
        run()
    for (kernel, side), launch in zip(STEPS.values(), launches, strict=True):
        if dtype is not torch.float32:
            few = launch.meta[side] < 64  # rows for a warp group: mma.sync
            mma[kernel] = "HMMA" if few else {9: "HGMMA", 10: "UTC"}.get(arch // 10, "HMMA")
    return Variant(f"D={D} {str(dtype).removeprefix('torch.')} {masks}", run, mma)


# --- problems -------------------------------------------------------------------------------------


def problem(B: int, T: int, H: int, D: int, **more: Any) -> dict[str, Any]:
    return {"B": B, "T": T, "H": H, "D": D, **more}


FULL = {"causal": False}
EVERYTHING = {"docs": 9, "window": 7, "dropout_p": 0.2}
# Interpreted tiles are 64 queries x 32 keys, and 32 queries x 64 keys for dK and dV.
PROBLEMS = {
    "causal": problem(3, 10, 1, 16, **STRUCTURAL),
    "everything": problem(1, 10, 3, 16, **EVERYTHING, **STRUCTURAL),
    "three": problem(2, 3, 3, 16, K=1),
    "63": problem(1, 63, 2, 16),
    "64": problem(1, 64, 2, 64, K=1),
    "65": problem(1, 65, 1, 80),
    "127": problem(1, 127, 1, 16),
    "257": problem(1, 257, 1, 16),
    "grouped": problem(1, 70, 6, 16, K=2),
    "last-query": problem(2, 1, 2, 64, Tk=127, K=1),
    "tail": problem(1, 65, 1, 16, Tk=200),
    "queries-that-see-nothing": problem(1, 200, 1, 16, Tk=65),
    "full": problem(1, 65, 2, 16, K=1, **FULL),
    "full-63": problem(1, 63, 1, 80, Tk=64, **FULL),
    "cross": problem(1, 3, 2, 16, Tk=200, **FULL),
    "cross-few-keys": problem(1, 127, 1, 64, Tk=3, **FULL),
    "scale": problem(1, 40, 1, 16, scale=0.7),
    "negative-scale": problem(1, 40, 1, 16, scale=-0.4),
    "zero-scale": problem(1, 40, 1, 16, scale=0.0),
    "window-2": problem(1, 65, 1, 16, window=2),
    "window-50": problem(1, 200, 1, 16, window=50),
    "window-120": problem(1, 200, 1, 16, window=120),
    "window-beyond": problem(1, 65, 1, 16, window=65),
    "window-tail": problem(1, 63, 1, 16, Tk=127, window=30, **FULL),
    "window-sees-nothing": problem(1, 127, 1, 16, Tk=40, window=20),
    "head-of-1": problem(1, 5, 2, 1),
    "head-of-256": problem(1, 33, 1, 256),
    "documents": problem(2, 127, 1, 16, docs=60),
    "documents-full": problem(2, 100, 1, 16, docs=60, **FULL),
    "documents-short": problem(2, 65, 1, 16, docs=3),
    "documents-window": problem(1, 127, 1, 16, docs=60, window=9),
    "documents-tail": problem(2, 40, 1, 16, Tk=100, docs=60),
    "documents-tail-full": problem(1, 40, 1, 16, Tk=100, docs=60, **FULL),
    "documents-longer-than-tiles": problem(1, 200, 1, 16, docs=300),
    "dropout": problem(2, 65, 2, 16, K=1, dropout_p=0.3),
    "dropout-full": problem(1, 40, 3, 16, Tk=100, dropout_p=0.3, **FULL),
    "dropout-padded-head": problem(1, 65, 1, 80, dropout_p=0.3),
    "dropout-window": problem(1, 127, 1, 16, dropout_p=0.3, window=40),
}
SIZES = {
    "cuda": {
        "gpt2-124m": problem(16, 1024, 12, 64),
        "4k-d128": problem(4, 4096, 16, 128),
        "16k-d128": problem(1, 16384, 16, 128),
        "gpt2-355m": problem(16, 1024, 16, 64),
        "gpt2-774m": problem(8, 1024, 20, 64),
        "gpt2-1558m": problem(8, 1024, 25, 64),
        "4k-d64": problem(4, 4096, 16, 64),
        "16k-d64": problem(1, 16384, 16, 64),
        "awkward-t1000-d80": problem(5, 1000, 7, 80),
        "awkward-t257-d64": problem(33, 257, 5, 64),
        "documents-of-500": problem(16, 1024, 12, 64, docs=1000),
    },
    "cpu": {
        "gpt2-124m": problem(2, 1024, 12, 64),
        "shakespeare-char": problem(16, 256, 6, 64),
        "shakespeare-cpu": problem(24, 64, 4, 32),
        "awkward": problem(3, 257, 5, 40),
    },
}
GROWING: tuple[Problem, ...] = tuple(
    {"B": B, "T": T}
    for B, T in ((2, 9), (4, 32), (2, 11), (4, 8), (1, 1), (1, 2), (2, 1), (16, 16), (16, 1000))
)
ATTENTION = Spec(
    name="attention",
    op=attention,
    ref=attention_seeded_ref,
    eager=eager,
    inputs=inputs,
    options=options,
    launches=lambda s: (FWD, DQ, DKV),
    variants=variants,
    work=flops_and_bytes,
    problems=PROBLEMS,
    sizes=SIZES,
    changes=Changes(
        growing=GROWING,
        empty=({"B": 0}, {"T": 0}, {"Tk": 0, "docs": 0}, {"H": 0, "K": 1}),
        far=({"B": 3, "H": 1}, {"B": 1, "H": 3}),
    ),
    cpu=attention_blocked,
)
ATTENTION_PACKED = replace(
    ATTENTION,
    name="attention_packed",
    op=attention_packed,
    ref=packed(attention_seeded_ref),
    eager=packed(eager),
    inputs=packed_inputs,
    options=packed_options,
    variants=lambda arch: iter(()),  # the kernels are those of `attention`
    problems={
        "causal": problem(1, 70, 2, 16),
        "everything": problem(1, 10, 3, 16, K=1, **EVERYTHING, **STRUCTURAL),
        "negative-scale": problem(2, 40, 2, 16, K=1, scale=-0.4),
        "padded-head": problem(2, 70, 2, 80),
        "many-tiles": problem(2, 127, 4, 16, K=2, **EVERYTHING),
    },
    sizes={
        "cuda": {k: s for k, s in SIZES["cuda"].items() if k.startswith("gpt2")},
        "cpu": {"shakespeare-char": SIZES["cpu"]["shakespeare-char"]},
    },
    changes=Changes(growing=GROWING, empty=({"B": 0}, {"T": 0}), far=({"B": 3}, {"H": 1, "K": 1})),
    cpu=packed(attention_blocked),
)
SPECS = (ATTENTION, ATTENTION_PACKED)
