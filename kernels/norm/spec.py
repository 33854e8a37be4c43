"""Specs of the four normalisations."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from ..proof.compile import Variant
from ..spec import STRUCTURAL, Changes, Make, Problem, Spec, Work, meta, rows, short, step, work
from . import op

FWD, DOTS, BWD = "_norm_fwd_kernel", "_norm_dots_kernel", "_norm_bwd_kernel"
SUM = "_reduce_partials_kernel"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDE = 8_192 + 40
"""Row length for which the backward processes the columns in parts."""
VECTORS = {"layer": ("weight", "bias"), "rms": ("weight",)}


def variants(arch: int) -> Iterator[Variant]:
    """Yields the kernel variants to compile: GPTs' own, and each block size with all options.

    The costliest variant of a size is fp32 with all options; with fewer a row of 8192 stays whole.
    """
    for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384):
        yield variant(n, FP32, FP32, residual=FP32, x_bias=True)
    yield variant(8192, FP32, FP32, residual=FP32)
    yield variant(8192, BF16, FP32, residual=FP32, centred=False, bias=False)
    yield variant(8192, BF16, FP32, residual=FP32)
    for n in (768, 1600, 4096):
        yield variant(n, BF16, BF16, residual=BF16, bias=n != 4096)
        yield variant(n, BF16, FP32)
    for stream in (FP32, BF16):  # --train.residual
        yield variant(768, BF16, FP32, residual=stream, x_bias=True)
    yield variant(768, BF16, FP32, centred=False, bias=False)
    yield variant(768, FP16, FP32, residual=FP16)


def variant(
    n: int, dtype: torch.dtype, weight: torch.dtype, residual: torch.dtype | None = None, *,
    bias: bool = True, centred: bool = True, x_bias: bool = False,
) -> Variant:  # fmt: skip
    def run() -> None:
        w, b, xb = (meta(n, dtype=weight) if given else None for given in (True, bias, x_bias))
        x, r = (meta(4096, n, dtype=of) if of else None for of in (dtype, residual))

        def norm(*tensors: Tensor) -> Any:
            found = op.run(*tensors, eps=1e-5, centred=centred)
            return found if residual else found[0]

        step(norm, x, r, w, b, xb)

    parts = ["layer" if centred else "rms", f"N={n} {short(dtype)} weight={short(weight)}"]
    parts += ["bias"] * bias + ["x_bias"] * x_bias
    parts += [f"residual={short(residual)}"] * (residual is not None)
    return Variant(" ".join(parts), run)


NO_WEIGHT: Problem = {"M": (3, 7), "N": 24, "eps": 0.1, "without": ("weight", "bias")}
PROBLEMS: dict[str, Problem] = {
    "three-dimensions": {"M": (4, 5), "N": 24, **STRUCTURAL},
    "one-row": {"M": 1, "N": 8},
    # eps of 1: with less, RMSNorm's dx is smaller than its rounding error
    "one-column": {"M": 5, "N": 1, "eps": 1.0},
    "masked-tail": {"M": 7, "N": 123},
    "rows-and-columns-masked": {"M": 21, "N": 60},
    "more-tiles-than-programs": {"M": 23, "N": 520},
    "many-tiles": {"M": (3, 50), "N": 200},
    "gpt2-xl": {"M": 3, "N": 1600},
    "no-weight": {**NO_WEIGHT, **STRUCTURAL},
}
SUMMED: dict[str, Problem] = {
    "x-bias": {"M": (2, 23), "N": 520, "x_bias": True, **STRUCTURAL},
    "x-bias-no-weight": {**NO_WEIGHT, "x_bias": True},
    "many-results": {"M": 3, "N": 4104, "x_bias": True},
    "widest-whole-row": {"M": 3, "N": 8192},
    "row-in-parts": {"M": 3, "N": WIDE},
}
WIDTHS = {"gpt2-124m": 768, "gpt2-355m": 1024, "gpt2-774m": 1280, "gpt2-1558m": 1600}
SIZES: dict[str, dict[str, Problem]] = {
    "cuda": {
        "n768": {"M": 65536, "N": 768},
        "n1600": {"M": 65536, "N": 1600},
        "n4096": {"M": 65536, "N": 4096},
        **{name: {"M": 16384, "N": C} for name, C in WIDTHS.items()},
        "n16384": {"M": 8192, "N": 16384},
        "awkward": {"M": 10007, "N": 777},
    },
    "cpu": {"gpt2-124m": {"M": 2048, "N": 768}, "awkward": {"M": 1003, "N": 777}},
}


def with_x_bias(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` with its argument x_bias as the last tensor, where a problem has one."""

    def call(*tensors: Tensor, x_bias: bool = False, **options: Any) -> Any:
        if not x_bias:
            return f(*tensors, **options)
        return f(*tensors[:-1], x_bias=tensors[-1], **options)

    return call


def norm_spec(kind: str, *, summed: bool) -> Spec:
    """Builds the spec of layer_norm or rms_norm (`kind`: layer, rms), alone or with a residual."""
    name = f"{'add_' if summed else ''}{kind}_norm"
    plain: Callable[..., Tensor] = F.layer_norm if kind == "layer" else F.rms_norm
    default = {"eps": 1e-5 if kind == "layer" else 1e-6}

    def split(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        return (tensors[0], tensors[1:]) if summed else (None, tensors)

    def ref(x: Tensor, *tensors: Tensor, **options: Any) -> Any:
        (residual, vectors), asked = split(tensors), {**default, **options}
        found = op.norm_ref(x, *vectors, residual=residual, centred=kind == "layer", **asked)
        return found if summed else found[0]

    def eager(x: Tensor, *tensors: Tensor, x_bias: Tensor | None = None, **options: Any) -> Any:
        residual, vectors = split(tensors)
        total = x if residual is None else op.residual_sum(x, x_bias, residual)
        y = plain(total, x.shape[-1:], *vectors, **{**default, **options})
        return (y, total) if summed else y

    def vectors_of(s: Problem) -> list[str]:
        given = [vector for vector in VECTORS[kind] if vector not in s.get("without", ())]
        return given + ["x_bias"] * s.get("x_bias", False)

    def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
        matrices = ("x", "residual") if summed else ("x",)
        made = {matrix: make(*rows(s), s["N"]) for matrix in matrices}
        return {**made, **{vector: make(s["N"]) for vector in vectors_of(s)}}

    def options(s: Problem, device: torch.device | str) -> dict[str, Any]:
        """Makes the keyword arguments of a test problem: vectors left out, and eps."""
        fixed = {vector: None for vector in VECTORS[kind] if vector not in vectors_of(s)}
        return {**fixed, **{option: s[option] for option in ("eps", "x_bias") if option in s}}

    def launches(s: Problem) -> tuple[str, ...]:
        vectors = len(vectors_of(s))
        in_parts = s["N"] > (4096 if vectors > 2 else 8192)
        return (FWD, BWD) + (SUM,) * (vectors > 0) + (DOTS,) * in_parts

    def bytes_moved(s: Problem, itemsize: int) -> Work:
        """Counts the bytes moved: x and y in the forward; x, dy and dx in the backward.

        With a sum: x, residual -> y, sum; backward: sum, dy, dsum -> one gradient for both inputs.
        Vectors of N and statistics are left out.
        """
        n = math.prod(rows(s)) * s["N"] * itemsize
        return work((0, 4 * n), (0, 4 * n)) if summed else work((0, 2 * n), (0, 3 * n))

    no_bias: dict[str, Problem] = {"no-bias": {"M": 7, "N": 24, "without": ("bias",)}}
    return Spec(
        name=name,
        op=with_x_bias(getattr(op, name)),
        ref=with_x_bias(ref),
        eager=with_x_bias(eager),
        cpu=with_x_bias(eager),
        inputs=inputs,
        options=options,
        launches=launches,
        variants=variants,
        work=bytes_moved,
        problems=PROBLEMS | (SUMMED if summed else {}) | (no_bias if kind == "layer" else {}),
        sizes=SIZES,
        changes=Changes(far=({"M": 3}, {"M": 3, "N": WIDE})),
    )


SPECS = tuple(norm_spec(kind, summed=summed) for kind in VECTORS for summed in (False, True))
