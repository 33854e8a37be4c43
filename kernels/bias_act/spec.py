"""Specs of `bias_act`."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..proof.compile import Variant
from ..spec import STRUCTURAL, Make, Problem, Spec, Work, meta, rows, short, step, work
from .op import ACTIVATIONS, bias_act, bias_act_ref

FWD, BWD, SUM = "_bias_act_fwd_kernel", "_bias_act_bwd_kernel", "_reduce_partials_kernel"


def eager(x: Tensor, bias: Tensor | None = None, *, kind: str) -> Tensor:
    return ACTIVATIONS[kind](x if bias is None else x + bias)


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    """Makes x (M, N) and a bias (N,); for swiglu N is 2F."""
    x = {"x": make(*rows(s), s["N"])}
    return {**x, "bias": make(s["N"])} if s.get("bias", True) else x


def options(s: Problem, device: torch.device | str) -> dict[str, Any]:
    """Makes the keyword arguments of a test problem: the activation, and no bias if asked."""
    return {"kind": s["kind"], **({} if s.get("bias", True) else {"bias": None})}


def bytes_moved(s: Problem, itemsize: int) -> Work:
    """Counts the bytes moved: x and y in the forward, x, dy and dx in the backward (no bias)."""
    x = math.prod(rows(s)) * s["N"] * itemsize
    y = x / 2 if s["kind"] == "swiglu" else x
    return work((0, x + y), (0, 2 * x + y))


def variants(arch: int) -> Iterator[Variant]:
    """Yields the kernel variants to compile: those that GPTs launch, in bf16 and some in fp32.

    relu is relu_squared without the square; fp32 is compiled for the costliest kind.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    for kind in ("gelu_tanh", "gelu_erf", "relu_squared"):
        yield variant(kind, 3072, bf16, fp32)
    yield variant("swiglu", 2048, bf16, fp32)
    yield variant("swiglu", 2048, bf16, None)
    for F in (16, 128, 1024):
        yield variant("swiglu", F, fp32, fp32)


def variant(kind: str, F: int, dtype: torch.dtype, bias: torch.dtype | None) -> Variant:
    def run() -> None:
        N = 2 * F if kind == "swiglu" else F
        b = meta(N, dtype=bias) if bias else None
        step(bias_act, meta(4096, N, dtype=dtype), b, kind=kind)

    return Variant(f"{kind} F={F} {short(dtype)} bias={short(bias)}", run)


WIDTHS = {"gpt2-124m": 768, "gpt2-355m": 1024, "gpt2-774m": 1280, "gpt2-1558m": 1600}
SHAPES = {
    "three-dimensions": ((4, 5), 24),
    "one-element": (1, 1),
    "masked-tail": (7, 123),
    "more-tiles-than-programs": (90, 300),
    "columns-in-parts": (11, 1030),
}


def spec(name: str, kinds: list[str], wide: int, sizes: dict[str, dict[str, Problem]]) -> Spec:
    """Builds the `Spec` of some kinds of activation, whose x is `wide` times as wide as y."""
    problems: dict[str, dict[str, Any]] = {
        f"{kind} {label}": {"M": M, "N": F * wide, "kind": kind}
        for kind in kinds
        for label, (M, F) in SHAPES.items()
    }
    for kind in kinds:
        problems[f"{kind} no bias"] = {"M": (3, 7), "N": 40, "kind": kind, "bias": False}
    for label in ("three-dimensions", "no bias"):
        problems[f"{kinds[0]} {label}"] |= STRUCTURAL
    return Spec(
        name=name,
        op=bias_act,
        ref=bias_act_ref,
        eager=eager,
        cpu=eager,
        inputs=inputs,
        options=options,
        launches=lambda s: (FWD, BWD, SUM) if s.get("bias", True) else (FWD, BWD),
        variants=variants,
        work=bytes_moved,
        problems=problems,
        sizes={
            on: {label: {**s, "kind": kinds[0]} for label, s in those.items()}
            for on, those in sizes.items()
        },
    )


BIAS_ACT = spec(
    "bias_act",
    [kind for kind in ACTIVATIONS if kind != "swiglu"],
    1,
    {
        "cuda": {
            **{label: {"M": 16384, "N": 4 * C} for label, C in WIDTHS.items()},
            "awkward": {"M": 10007, "N": 777},
        },
        "cpu": {"gpt2-124m": {"M": 1024, "N": 3072}, "awkward": {"M": 1003, "N": 777}},
    },
)
SWIGLU = spec(
    "bias_act_swiglu",
    ["swiglu"],
    2,
    {
        "cuda": {"gpt2-124m": {"M": 16384, "N": 4096}, "awkward": {"M": 10007, "N": 1554}},
        "cpu": {"gpt2-124m": {"M": 1024, "N": 4096}},
    },
)
SPECS = (BIAS_ACT, SWIGLU)
