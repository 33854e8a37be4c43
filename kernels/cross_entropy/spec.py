"""Specs of the losses.

A problem has the sizes M, V and, for a head, C; "ignored" if some targets are to be ignored, "bias"
if the head has one; all other entries are options of the op, but for "structural".
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..proof.compile import Variant
from ..spec import STRUCTURAL, Changes, Make, Problem, Spec, Work, meta, rows, short, work
from .linear import linear_cross_entropy, linear_cross_entropy_ref
from .op import cross_entropy, cross_entropy_ref
from .plain import LossOptions

FWD, BWD = "_cross_entropy_fwd_kernel", "_cross_entropy_bwd_kernel"


def eager(
    logits: Tensor, targets: Tensor, *, valid_vocab: int | None = None,
    softcap: float | None = None, z_loss: float = 0.0, inplace_grad: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Applies F.cross_entropy to all rows, in fp32 or wider; adds z_loss, which PyTorch lacks."""
    z = logits[..., :valid_vocab].to(torch.promote_types(logits.dtype, torch.float32))
    z = z.flatten(0, -2)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, targets.flatten(), **options)
    if z_loss:
        counted = (targets != options.get("ignore_index", -100)).flatten()
        squares = torch.where(counted, z.logsumexp(-1).square(), 0.0)
        reduction = options.get("reduction", "mean")
        if reduction != "none":
            squares = squares.sum() / (counted.sum() if reduction == "mean" else 1)
        loss = loss + z_loss * squares
    return loss.view(targets.shape) if loss.dim() else loss


def eager_linear(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
    chunk_tokens: int | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    return eager(F.linear(x, weight, bias), targets, **options)


def targets(s: Problem, make: Make) -> Tensor:
    """Makes random targets below the padding; ignores every third one if the problem says so."""
    found = make(*rows(s), below=s.get("valid_vocab", s["V"]))
    if s.get("ignored"):
        found.view(-1)[:1] = 0  # a target that counts, for any value of ignore_index
        found.view(-1)[1::3] = s.get("ignore_index", -100)
    return found


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    return {"logits": make(*rows(s), s["V"]), "targets": targets(s, make)}


def linear_inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    x, weight = make(*rows(s), s["C"]), make(s["V"], s["C"])
    found = {"x": x, "weight": weight, "targets": targets(s, make)}
    return {**found, "bias": make(s["V"])} if s.get("bias") else found


NO_OPTIONS = ("M", "C", "V", "bias", "ignored", "structural")


def options(s: Problem, device: torch.device | str) -> dict[str, Any]:
    return {k: v for k, v in s.items() if k not in NO_OPTIONS}


def bytes_moved(s: Problem, itemsize: int) -> Work:
    """Counts the bytes moved: logits to loss, logits to gradient; both read the logits once."""
    n = math.prod(rows(s)) * s["V"] * itemsize
    return {"fwd": (0, n), "bwd": (0, 2 * n), "both": (0, 2 * n)}


def linear_work(s: Problem, itemsize: int) -> Work:
    """Counts FLOPs and bytes: x, weight to loss, without logits in memory; to dx, dweight."""
    M, C, V = math.prod(rows(s)), s["C"], s["V"]
    flops, n = 2 * M * C * V, (M * C + V * C) * itemsize
    return {**work((flops, n), (2 * flops, 2 * n)), "both": (3 * flops, 2 * n)}


EVERY_OPTION: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}


def variants(arch: int) -> Iterator[Variant]:
    """Yields the kernel variants to compile: block sizes, options, padding, unaligned rows."""
    for dtype in (torch.bfloat16, torch.float32):
        for V in (256, 2048, 50_304, 128_256):
            yield from variants_of(V, dtype, **EVERY_OPTION)
    yield from variants_of(50_304, torch.bfloat16)
    yield from variants_of(50_304, torch.float16, valid=50_257)
    yield from variants_of(50_304, torch.bfloat16, valid=50_257)
    yield from variants_of(50_257, torch.bfloat16)  # rows that are not aligned


def variants_of(
    V: int, dtype: torch.dtype, valid: int | None = None, **values: Any
) -> Iterator[Variant]:
    options = LossOptions(valid or V, **values)
    logits, targets = meta(4096, V, dtype=dtype), meta(4096, dtype=torch.int64)
    stats, scale = meta(2, 4096), meta()

    def out_of_place() -> None:
        from .device import cross_entropy_bwd, cross_entropy_fwd

        cross_entropy_fwd(logits, targets, options, meta(4096), stats)
        cross_entropy_bwd(logits, targets, stats, scale, logits, options)

    def in_place() -> None:
        from .device import cross_entropy_fwd, cross_entropy_scale_

        cross_entropy_fwd(logits, targets, options, meta(4096), scale=scale)
        if valid is None:
            cross_entropy_scale_(logits, scale)

    label = " ".join([f"V={V} {short(dtype)}", *[f"valid={valid}"] * bool(valid), *values])
    yield Variant(label, out_of_place)
    yield Variant(f"{label} in place", in_place)


EVERY = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
GPT2 = {"V": 50_304, "valid_vocab": 50_257}
IN_PLACE = {"inplace_grad": True}
NONE = {"valid_vocab": 20, "reduction": "none"}
REDUCTIONS = ("mean", "sum", "none")
SMALLER: Problem = {"M": 5, "V": 1030}
EACH: dict[str, Problem] = {
    "plain": SMALLER,
    "label-smoothing": {**SMALLER, "label_smoothing": 0.1},
    "z-loss": {**SMALLER, "z_loss": 0.01, "valid_vocab": 1000},
    "softcap": {**SMALLER, "softcap": 3.0, "ignore_index": 1},
    "every option": {**SMALLER, **EVERY, "valid_vocab": 1030},
}
SHAPES: dict[str, Problem] = {
    "one-element-left-over": {"M": (3, 5), "V": 33},
    "one-lane-left-over": {"M": 7, "V": 1025},
    "bytes": {"M": 9, "V": 256},
    "two-vectors": {"M": 3, "V": 2048},
    "rows-in-parts": {"M": 2, "V": 8200},
    "rows-in-parts-of-another-size": {"M": (2, 2), "V": 16_500},
    "gpt2": {"M": 4, **GPT2},
    "gpt2-unpadded": {"M": 4, "V": 50_257},
    "wide": {"M": 4, "V": 128_256},
}
SMALL: Problem = {"M": (4, 5), "V": 24, "ignored": True}
CROSS_ENTROPY = Spec(
    name="cross_entropy",
    op=cross_entropy,
    ref=cross_entropy_ref,
    eager=eager,
    inputs=inputs,
    options=options,
    # in place, the kernels after the forward depend on the dtype
    launches=lambda s: (FWD,) if s.get("inplace_grad") else (FWD, BWD),
    variants=variants,
    work=bytes_moved,
    problems={
        "mean": {**SMALL, **STRUCTURAL},
        "none": {**SMALL, **EVERY, **NONE, **STRUCTURAL},
        "in place": {**SMALL, **EVERY, **IN_PLACE, **STRUCTURAL},
        "in place none": {**SMALL, **IN_PLACE, **NONE, **STRUCTURAL},
        **{
            f"{label} {reduction}{' in place' * in_place}": {
                **shape, "ignored": True, "reduction": reduction, "inplace_grad": in_place
            }
            for label, shape in (SHAPES | EACH).items()
            for reduction in (("mean", "none") if label in SHAPES else REDUCTIONS)
            for in_place in (False, True)
        },
    },
    sizes={
        "cuda": {
            "gpt2": {"M": 16_384, "V": 50_304, **IN_PLACE},
            "awkward": {"M": 4099, "V": 50_257, **IN_PLACE},
            "wide": {"M": 4096, "V": 128_256, **IN_PLACE},
        },
        "cpu": {
            "gpt2": {"M": 256, "V": 50_304, **IN_PLACE},
            "characters": {"M": 4096, "V": 65, **IN_PLACE},
        },
    },
)  # fmt: skip
CHUNKED: Problem = {"M": (3, 4), "C": 24, "V": 70, "ignored": True, "bias": True, "chunk_tokens": 5}
LINEAR_CROSS_ENTROPY = Spec(
    name="linear_cross_entropy",
    op=linear_cross_entropy,
    ref=linear_cross_entropy_ref,
    eager=eager_linear,
    inputs=linear_inputs,
    options=options,
    launches=lambda s: (FWD,),
    variants=variants,
    work=linear_work,
    terms=lambda s: s["V"],  # of the gradient of x, where a BLAS adds them in one chain
    problems={
        "mean": {**CHUNKED, **STRUCTURAL},
        "none": {**CHUNKED, **EVERY, **NONE, "bias": False, "valid_vocab": 61, **STRUCTURAL},
        **{
            f"{chunk} at a time {reduction}{' bias' * bias}": {
                **CHUNKED, "chunk_tokens": chunk, "reduction": reduction, "bias": bias
            }
            for chunk in (None, 1, 4, 5)
            for reduction in REDUCTIONS
            for bias in (False, True)
        },
        **{
            f"{label} {reduction}": {**CHUNKED, **chosen, "reduction": reduction}
            for label, chosen in {"every option": EVERY, "padded": {"valid_vocab": 61}}.items()
            for reduction in REDUCTIONS
        },
    },
    sizes={
        "cuda": {
            "gpt2-124m": {"M": 16_384, "C": 768, "V": 50_304},
            "gpt2-1558m": {"M": 8192, "C": 1600, "V": 50_304},
            "awkward": {"M": 4099, "C": 777, "V": 50_257},
        },
        "cpu": {"gpt2-124m": {"M": 256, "C": 768, "V": 50_304}},
        "cpu-full": {"gpt2-124m-4096": {"M": 4096, "C": 768, "V": 50_304}},
    },
    changes=Changes(far=({"M": 3, "V": 3, "valid_vocab": 3},)),
    exempt={"strides_do_not_matter": "a BLAS adds up in another order where rows are unaligned"},
)  # fmt: skip
SPECS = (CROSS_ENTROPY, LINEAR_CROSS_ENTROPY)
