"""Cases of the benchmark: every op's `Spec` at its sizes, beside other implementations.

Each size of an op in each dtype is a case: `attention/gpt2-124m/bf16`. No case is left out because
another implementation is faster there. CONTRIBUTING.md says how to add an op.

An implementation is a function of the device, `cpu` or `cuda`, that returns the callable or raises
`MissingError` with the reason why it cannot run here. A library is imported when it is first used.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.device.device import DTYPES, end_compile_workers_at_exit, fast_bf16, has_compiler
from fastgpt.errors import UserError, unknown_name
from fastgpt.kernels.runtime import INTERPRETING
from fastgpt.kernels.spec import Problem, Spec, Work
from fastgpt.kernels.specs import SPECS

Inputs = dict[str, Tensor]
Maker = Callable[[str], Callable[..., Any]]


class MissingError(Exception):
    """The reason why a peer cannot run here."""


def load(module: str, package: str, on: str) -> Any:
    """Imports the module of a package that runs on CUDA alone."""
    if on != "cuda":
        raise MissingError("needs CUDA")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingError(f"{package} is not installed ({error})") from error


def compiled(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the plain reference compiled by torch.compile."""
    if not has_compiler():
        raise MissingError("no C++ compiler was found (CXX, g++, clang++)")
    end_compile_workers_at_exit()
    return torch.compile(reference, dynamic=False)


# --- attention: (B, T, H, D) each -> (B, T, H, D), causal -----------------------------------------


def sdpa(backend: str, on: str) -> Callable[..., Tensor]:
    """F.scaled_dot_product_attention restricted to one backend of `SDPBackend`."""
    if on == "cpu" and backend != "FLASH_ATTENTION":
        raise MissingError("needs CUDA")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return call


def flex(on: str) -> Callable[..., Tensor]:
    """FlexAttention, compiled, with a causal block mask that is made once."""
    if on != "cuda":
        raise MissingError("needs CUDA: on a CPU it has no backward")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    masks: dict[tuple[int, int | None], Any] = {}  # made once, as a step shares it among its layers
    attend = torch.compile(flex_attention, dynamic=False)

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def call(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
        B, T = q.shape[:2]
        key = T, None if doc_ids is None else doc_ids.data_ptr()
        if key not in masks:
            seen = causal
            if doc_ids is not None:
                seen = lambda b, h, i, j: (i >= j) & (doc_ids[b, i] == doc_ids[b, j])  # noqa: E731
            batch = None if doc_ids is None else B
            masks[key] = create_block_mask(seen, batch, None, T, T, device=on)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, block_mask=masks[key]).transpose(1, 2)

    return call


def varlen(on: str) -> Callable[..., Tensor]:
    """PyTorch's attention over sequences of several lengths: here documents, without padding."""
    try:
        attend = load("torch.nn.attention.varlen", "PyTorch 2.13", on).varlen_attn
        inspect.signature(attend).bind_partial(window_size=(-1, 0))
    except (AttributeError, TypeError) as error:
        raise MissingError(f"needs PyTorch 2.13 ({error})") from error
    ends: dict[int, tuple[Tensor, int]] = {}

    def call(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor) -> Tensor:
        if doc_ids.data_ptr() not in ends:
            ends[doc_ids.data_ptr()] = boundaries(doc_ids)
        offsets, longest = ends[doc_ids.data_ptr()]
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = attend(*rows, offsets, offsets, longest, longest, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out.view(q.shape)

    return call


def boundaries(doc_ids: Tensor) -> tuple[Tensor, int]:
    """Returns the offsets where documents (B, T) begin and end, int32, and the longest's length."""
    begins = doc_ids.diff(dim=1, prepend=doc_ids[:, :1] - 1) != 0
    total = torch.tensor([doc_ids.numel()], device=doc_ids.device)
    offsets = torch.cat((begins.flatten().nonzero()[:, 0], total))
    return offsets.int(), int(offsets.diff().max())


def flash_attn(module: str, package: str, function: str, on: str) -> Callable[..., Tensor]:
    """Attention of the package flash-attn; with `lengths` over a cache, for one new token each."""
    attend = getattr(load(module, package, on), function)

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Tensor:
        options = {"causal": True} if lengths is None else {"cache_seqlens": lengths}
        out = attend(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def sdpa_decoding(on: str) -> Callable[..., Tensor]:
    """F.scaled_dot_product_attention over caches that are full."""

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return call


def packed(maker: Maker, on: str) -> Callable[..., Tensor]:
    """Wraps attention for one tensor (B, T, 3 H, D): it gets the slices as views."""
    attend = maker(on)
    return lambda qkv: attend(*qkv.chunk(3, dim=2))


ATTENTION: dict[str, Maker] = {
    "sdpa-flash": partial(sdpa, "FLASH_ATTENTION"),
    "sdpa-cudnn": partial(sdpa, "CUDNN_ATTENTION"),
    "sdpa-efficient": partial(sdpa, "EFFICIENT_ATTENTION"),
    "flex": flex,
    "flash-attn-2": partial(flash_attn, "flash_attn", "flash-attn 2", "flash_attn_func"),
    "flash-attn-3": partial(flash_attn, "flash_attn_interface", "flash-attn 3", "flash_attn_func"),
    "flash-attn-4": partial(flash_attn, "flash_attn.cute", "flash-attn 4", "flash_attn_func"),
}
DOCUMENTS: dict[str, Maker] = {"flex": flex, "varlen": varlen}
"""Attention within documents, given as `doc_ids` (B, T)."""


# --- losses, Liger --------------------------------------------------------------------------------


def chunked_cross_entropy(on: str) -> Callable[..., Tensor]:
    """F.linear_cross_entropy in chunks of tokens and vocabulary, as PyTorch chooses them."""
    if on != "cuda":
        raise MissingError("needs CUDA: on a CPU it took ten times as long as eager")
    try:
        return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
    except AttributeError as error:
        raise MissingError("needs PyTorch 2.13") from error


def liger(
    module: str, function: str, on: str, *, keep: int | None = None, constants: tuple[Any, ...] = ()
) -> Callable[..., Any]:
    """Wraps an autograd function of the package liger-kernel.

    Args:
        keep: number of results to keep; None keeps all.
        constants: arguments after the tensors.
    """
    apply = getattr(load(f"liger_kernel.ops.{module}", "liger-kernel", on), function).apply

    def call(*inputs: Tensor) -> Any:
        out = apply(*inputs, *constants)
        return out if keep is None else out[0] if keep == 1 else out[:keep]

    return call


def liger_swiglu(on: str) -> Callable[..., Tensor]:
    product = liger("swiglu", "LigerSiLUMulFunction", on)
    return lambda x, bias: product(*(x + bias).chunk(2, dim=-1))


# the last constant forbids to overwrite the upstream gradient, which the next call needs
RMS = (1e-6, 0.0, "llama", False)
CACHED = "flash_attn_with_kvcache"
DECODING: dict[str, Maker] = {
    "sdpa": sdpa_decoding,
    "flash-attn-2": partial(flash_attn, "flash_attn", "flash-attn 2", CACHED),
    "flash-attn-3": partial(flash_attn, "flash_attn_interface", "flash-attn 3", CACHED),
}
LIGER: dict[str, Maker] = {
    "layer_norm": partial(liger, "layer_norm", "LigerLayerNormFunction", constants=(1e-5,)),
    "rms_norm": partial(liger, "rms_norm", "LigerRMSNormFunction", constants=RMS),
    "add_rms_norm": partial(
        liger, "fused_add_rms_norm", "LigerFusedAddRMSNormFunction", constants=RMS
    ),
    "cross_entropy": partial(
        liger, "cross_entropy", "LigerCrossEntropyFunction", keep=1, constants=(None,)
    ),
    "linear_cross_entropy": partial(
        liger, "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", keep=1
    ),
    "bias_act_swiglu": liger_swiglu,
}
PEERS: dict[str, dict[str, Maker]] = {
    "attention": ATTENTION,
    "attention_packed": {name: partial(packed, maker) for name, maker in ATTENTION.items()},
    "decode_attention": DECODING,
    **{op: {"liger": maker} for op, maker in LIGER.items()},
}
PEERS["linear_cross_entropy"]["torch-chunked"] = chunked_cross_entropy
"""Implementations by other libraries to compare each op with, by the op's name."""


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
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

    def implementations(self, against: tuple[str, ...] = ()) -> dict[str, Maker]:
        """Returns `ours` and others by name, such as `eager` (PyTorch's own ops).

        Args:
            against: names of the others; all of them by default, but torch.compile on a CPU.
        """
        spec, others = self.spec, self.peers
        if self.shape.get("docs"):
            others = {name: self._with_options(maker) for name, maker in DOCUMENTS.items()}

        def ours(on: str) -> Callable[..., Any]:
            """Our kernel where kernels run, else the function that the model calls on a CPU."""
            op = spec.op if on == "cuda" or INTERPRETING else spec.cpu or spec.op
            return spec.call(op, self.shape, on)

        def compiling(on: str) -> Callable[..., Any]:
            if on == "cpu" and not against:
                raise MissingError("takes 10 to 20 s a case on a CPU: --against compiled")
            return spec.call(compiled(spec.eager), self.shape, on)

        found = {
            "ours": ours,
            "eager": lambda on: spec.call(spec.eager, self.shape, on),
            "compiled": compiling,
            **others,
        }
        return {k: v for k, v in found.items() if not against or k in ("ours", *against)}

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
    op: tuple[str, ...] = (),
    size: tuple[str, ...] = (),
    dtype: tuple[str, ...] = (),
    *,
    against: tuple[str, ...] = (),
    quick: bool = False,
    full: bool = False,
) -> list[Case]:
    """Returns the cases of a kind of device, `cpu` or `cuda`.

    Args:
        op: names of ops; all by default.
        size: names of sizes. By default all that are worth measuring on the device; `tiny`, the
            first small problem of each op, is for rehearsals in Triton's interpreter.
        dtype: bf16, fp16 or fp32; by default those that are worth measuring on the device.
        against: names of implementations, which must be known.
        quick: only the first case of each op.
        full: include the sizes that take long.

    Raises:
        UserError: a name is unknown, or nothing matches.
    """
    for name in op:
        if name not in SPECS:
            raise unknown_name("op", name, SPECS)
    known = {"eager", "compiled", *DOCUMENTS, *(name for peers in PEERS.values() for name in peers)}
    for name in against:
        if name not in known:
            raise unknown_name("implementation", name, sorted(known))
    tiny = size == ("tiny",)
    usual = ("bf16",) if on == "cuda" else ("bf16", "fp32") if fast_bf16(on) else ("fp32",)

    def sizes(spec: Spec) -> dict[str, Problem]:
        if tiny:
            return {"tiny": next(iter(spec.problems.values()))}
        slow = full or bool(size)
        return {**spec.sizes.get(on, {}), **(spec.sizes.get(f"{on}-full", {}) if slow else {})}

    found = [
        Case(SPECS[name], label, shape, number, PEERS.get(name, {}))
        for name in op or SPECS
        for label, shape in sizes(SPECS[name]).items()
        if not size or label in size
        # fp32 is right in Triton's interpreter and fast on a CPU
        for number in dtype or (("fp32",) if tiny else usual)
    ]
    if quick:
        found = [*{case.spec.name: case for case in reversed(found)}.values()][::-1]
    if not found:
        known = sorted({label for name in op or SPECS for label in sizes(SPECS[name])})
        raise UserError(f"no case has --size {' '.join(size)}: expected some of {' '.join(known)}")
    return found
