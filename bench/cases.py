"""Benchmark cases: every op's `Spec` at its sizes, beside other implementations.

Each size of an op in each dtype is a case: `attention/gpt2-124m/bf16`. `--quick` takes the first
size of an op; `--full` adds those under "cpu-full". No case is left out because another
implementation is faster there. CONTRIBUTING.md says how to add an op.
"""

import fnmatch
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import peers
from bench.peers import Maker, compiled, flash_attn_decoding, liger
from fastgpt.device.device import DTYPES, fast_bf16
from fastgpt.errors import UserError
from fastgpt.kernels.runtime import INTERPRETING
from fastgpt.kernels.spec import Problem, Spec, Work
from fastgpt.kernels.specs import SPECS

Inputs = dict[str, Tensor]


def _no_such_peer(on: str) -> Callable[..., Any]:
    raise peers.MissingError("liger-kernel lacks this op")


def _liger_swiglu(on: str) -> Callable[..., Tensor]:
    product = liger("swiglu", "LigerSiLUMulFunction", None)(on)
    return lambda x, bias: product(*(x + bias).chunk(2, dim=-1))


PEERS: dict[str, dict[str, Maker]] = {
    "attention": peers.ATTENTION,
    "attention_packed": {name: peers.packed(maker) for name, maker in peers.ATTENTION.items()},
    "layer_norm": {"liger": liger("layer_norm", "LigerLayerNormFunction", None, 1e-5)},
    "add_layer_norm": {"liger": _no_such_peer},
    "rms_norm": {
        "liger": liger("rms_norm", "LigerRMSNormFunction", None, 1e-6, 0.0, "llama", False)
    },
    # its default overwrites the upstream gradient, which the next call needs
    "add_rms_norm": {
        "liger": liger(
            "fused_add_rms_norm", "LigerFusedAddRMSNormFunction", None, 1e-6, 0.0, "llama", False
        )
    },
    "cross_entropy": {"liger": liger("cross_entropy", "LigerCrossEntropyFunction", 1, None)},
    "linear_cross_entropy": {
        "liger": liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", 1),
        "torch-chunked": peers.chunked_cross_entropy,
    },
    "bias_act_swiglu": {"liger": _liger_swiglu},
    "decode_attention": {
        "sdpa": peers.always(peers.sdpa_decoding),
        "flash-attn-2": flash_attn_decoding("flash_attn", "flash-attn 2"),
        "flash-attn-3": flash_attn_decoding("flash_attn_interface", "flash-attn 3"),
    },
}
"""Implementations by other libraries to compare each op with, by the op's name."""


@dataclass(frozen=True, slots=True)
class Case:
    """An op with input sizes and a dtype, to be benchmarked."""

    spec: Spec
    label: str
    shape: Problem
    dtype: str
    peers: Mapping[str, Maker]

    @property
    def name(self) -> str:
        return f"{self.spec.name}/{self.label}/{self.dtype}"

    @property
    def passes(self) -> tuple[str, ...]:
        return ("fwd", "bwd", "both") if self.spec.differentiable else ("fwd",)

    @property
    def implementations(self) -> dict[str, Maker]:
        """Returns implementations by name: `ours`, `eager` (PyTorch's own ops) and other ones."""
        spec, others = self.spec, self.peers
        if self.shape.get("docs"):
            others = {name: self._with_options(maker) for name, maker in peers.DOCUMENTS.items()}

        def ours(on: str) -> Callable[..., Any]:
            """Our kernel where kernels run, else the function that the model calls on a CPU."""
            op = spec.op if on == "cuda" or INTERPRETING else spec.cpu or spec.op
            return spec.call(op, self.shape, on)

        return {
            "ours": ours,
            "eager": lambda on: spec.call(spec.eager, self.shape, on),
            "compiled": lambda on: spec.call(compiled(spec.eager)(on), self.shape, on),
            **others,
        }

    def _with_options(self, maker: Maker) -> Maker:
        return lambda on: self.spec.call(maker(on), self.shape, on)

    def inputs(self, on: str) -> Inputs:
        """Makes random inputs, never zeros, because the data affects a GPU's power and clocks."""
        generator = torch.Generator(on).manual_seed(0)
        dtype = DTYPES[self.dtype]

        def make(*sizes: int, below: int = 0) -> Tensor:
            if below:
                return torch.randint(below, sizes, device=on, generator=generator)
            drawn = torch.randn(sizes, device=on, generator=generator)
            return drawn.to(dtype).requires_grad_(self.spec.differentiable)

        return self.spec.inputs(self.shape, make)

    def work(self) -> Work:
        return self.spec.work(self.shape, DTYPES[self.dtype].itemsize)


def cases(
    on: str,
    *,
    only: tuple[str, ...] = (),
    names: Container[str] | None = None,
    quick: bool = False,
    full: bool = False,
    tiny: bool = False,
    every_dtype: bool = False,
) -> Iterator[Case]:
    """Yields the cases of a kind of device, or those whose names match a pattern of `only`.

    Args:
        on: `cpu` or `cuda`.
        only: shell patterns: `attention/*`, `*/gpt2-124m/bf16`.
        names: if given, only the cases of these names.
        quick: only the first size of each op, in its first dtype.
        full: include the cases that take long.
        tiny: the first small problem of each op instead of its sizes, for a rehearsal.
        every_dtype: bf16, fp16 and fp32, not only the dtypes that are worth measuring.

    Raises:
        UserError: nothing matches.
    """
    dtypes = ("bf16",) if on == "cuda" else ("bf16", "fp32") if fast_bf16(on) else ("fp32",)
    if tiny:
        dtypes = ("fp32",)  # right in Triton's interpreter and fast on a CPU
    if every_dtype:
        dtypes = ("bf16", "fp16", "fp32")

    def sizes(spec: Spec) -> dict[str, Problem]:
        if tiny:
            return {"tiny": next(iter(spec.problems.values()))}
        return {**spec.sizes.get(on, {}), **(spec.sizes.get(f"{on}-full", {}) if full else {})}

    found = [
        Case(spec, label, shape, dtype, PEERS.get(name, {}))
        for name, spec in SPECS.items()
        for label, shape in sizes(spec).items()
        for dtype in dtypes
    ]
    if quick:
        found = list({case.spec.name: case for case in reversed(found)}.values())[::-1]
    if names is not None:
        found = [case for case in found if case.name in names]
    chosen = [c for c in found if not only or any(fnmatch.fnmatch(c.name, p) for p in only)]
    if not chosen:
        raise UserError(f"{' '.join(only)} matches no case; --list shows all")
    yield from chosen
