"""Cases of the benchmark: every op's `Spec` at its sizes, beside other implementations.

Each size of an op in each dtype is a case: `attention/gpt2-124m/bf16`. No case is left out because
another implementation is faster there. CONTRIBUTING.md says how to add an op.

An implementation is a function of the device, `cpu` or `cuda`, that returns the callable or raises
an error with the reason why it cannot run here. A library is imported when it is first used.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastgpt.device.device import DTYPES, end_compile_workers_at_exit, fast_bf16
from fastgpt.errors import UserError, unknown_name
from fastgpt.kernels.runtime import INTERPRETING
from fastgpt.kernels.spec import Problem, Spec, Work
from fastgpt.kernels.specs import SPECS

Inputs = dict[str, Tensor]
Call = Callable[..., Any]
Maker = Callable[[str], Call]
Names = tuple[str, ...]


def load(module: str, package: str, on: str) -> Any:
    """Imports the module of a package that runs on CUDA alone."""
    if on != "cuda":
        raise UserError("needs CUDA")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{package} is not installed ({error})") from error


# --- attention: (B, T, H, D) each -> (B, T, H, D), causal -----------------------------------------


def heads_first(attend: Call) -> Call:
    """Wraps attention on tensors (B, H, T, D), for tensors (B, T, H, D)."""

    def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, **options: Tensor) -> Tensor:
        qkv = (x.transpose(1, 2) for x in (q, k, v))
        return attend(*qkv, *more, **options).transpose(1, 2)

    return call


def sdpa(backend: SDPBackend, on: str) -> Call:
    """F.scaled_dot_product_attention restricted to one backend."""
    if on == "cpu" and backend != SDPBackend.FLASH_ATTENTION:
        raise UserError("needs CUDA")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return heads_first(call)


def flex(on: str) -> Call:
    """FlexAttention, compiled, with a block mask that is made once, as layers share it in a step.

    On a CPU it has no backward.
    """
    module = load("torch.nn.attention.flex_attention", "PyTorch", on)
    attend = torch.compile(module.flex_attention, dynamic=False)

    @cache
    def mask(T: int, doc_ids: Tensor | None) -> Any:
        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i >= j if doc_ids is None else (i >= j) & (doc_ids[b, i] == doc_ids[b, j])

        batch = None if doc_ids is None else len(doc_ids)
        return module.create_block_mask(seen, batch, None, T, T, device=on)

    def call(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
        return attend(q, k, v, block_mask=mask(q.shape[2], doc_ids))

    return heads_first(call)


def varlen(on: str) -> Call:
    """PyTorch's attention over sequences of several lengths: here documents, without padding."""
    attend = load("torch.nn.attention.varlen", "PyTorch 2.13", on).varlen_attn
    ends = cache(boundaries)

    def call(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor) -> Tensor:
        offsets, longest = ends(doc_ids)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = attend(*rows, offsets, offsets, longest, longest, window_size=(-1, 0))
        return out.view(q.shape)

    return call


def boundaries(doc_ids: Tensor) -> tuple[Tensor, int]:
    """Returns the offsets where documents (B, T) begin and end, int32, and the longest's length."""
    begins = doc_ids.diff(dim=1, prepend=doc_ids[:, :1] - 1) != 0
    offsets = F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=doc_ids.numel())
    return offsets.int(), int(offsets.diff().max())


FLASH_ATTN = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}  # modules


def flash_attn(version: int, function: str, on: str) -> Call:
    """Attention of the package flash-attn; with `lengths` over a cache, for one new token each."""
    attend = getattr(load(FLASH_ATTN[version], f"flash-attn {version}", on), function)

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Tensor:
        options = {"causal": True} if lengths is None else {"cache_seqlens": lengths}
        out = attend(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def sdpa_decoding(on: str) -> Call:
    """F.scaled_dot_product_attention over caches that are full, which needs no lengths."""
    return heads_first(lambda q, k, v, lengths: F.scaled_dot_product_attention(q, k, v))


def packed(maker: Maker, on: str) -> Call:
    """Wraps attention for one tensor (B, T, 3 H, D): it gets the slices as views."""
    attend = maker(on)
    return lambda qkv: attend(*qkv.chunk(3, dim=2))


ATTENTION: dict[str, Maker] = {
    "sdpa-flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    **{f"flash-attn-{x}": partial(flash_attn, x, "flash_attn_func") for x in FLASH_ATTN},
}
DOCUMENTS: dict[str, Maker] = {"flex": flex, "varlen": varlen}
"""Attention within documents, given as `doc_ids` (B, T)."""


def chunked_cross_entropy(on: str) -> Call:
    """F.linear_cross_entropy in chunks of tokens and vocabulary, as PyTorch chooses them."""
    if on != "cuda":
        raise UserError("needs CUDA: on a CPU it took ten times as long as eager")
    return partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())


def liger(
    module: str, name: str, on: str, *, constants: tuple[Any, ...] = (), first: bool = False
) -> Call:
    """Wraps an autograd function of the package liger-kernel, with constants after its tensors."""
    found = load(f"liger_kernel.ops.{module}", "liger-kernel", on)
    apply = getattr(found, f"Liger{name}Function").apply

    def call(*inputs: Tensor) -> Any:
        out = apply(*inputs, *constants)
        return out[0] if first else out

    return call


def liger_swiglu(on: str) -> Call:
    product = liger("swiglu", "SiLUMul", on)
    return lambda x, bias: product(*(x + bias).chunk(2, dim=-1))


# the last constant forbids to overwrite the upstream gradient, which the next call needs
RMS = (1e-6, 0.0, "llama", False)
LIGER: dict[str, Maker] = {
    "layer_norm": partial(liger, "layer_norm", "LayerNorm", constants=(1e-5,)),
    "rms_norm": partial(liger, "rms_norm", "RMSNorm", constants=RMS),
    "add_rms_norm": partial(liger, "fused_add_rms_norm", "FusedAddRMSNorm", constants=RMS),
    "cross_entropy": partial(liger, "cross_entropy", "CrossEntropy", constants=(None,), first=True),
    "linear_cross_entropy": partial(
        liger, "fused_linear_cross_entropy", "FusedLinearCrossEntropy", first=True
    ),
    "bias_act_swiglu": liger_swiglu,
}
PEERS: dict[str, dict[str, Maker]] = {
    "attention": ATTENTION,
    "attention_packed": {name: partial(packed, maker) for name, maker in ATTENTION.items()},
    "decode_attention": {
        "sdpa": sdpa_decoding,
        **{f"flash-attn-{x}": partial(flash_attn, x, "flash_attn_with_kvcache") for x in (2, 3)},
    },
    **{op: {"liger": maker} for op, maker in LIGER.items()},
}
PEERS["linear_cross_entropy"]["torch-chunked"] = chunked_cross_entropy
"""Implementations by other libraries to compare each op with, by the op's name."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """An op with input sizes and a dtype, to be benchmarked."""

    spec: Spec
    label: str
    shape: Problem
    dtype: str
    peers: Mapping[str, Maker]
    against: Names = ()
    """Implementations to measure beside ours; by default all, but torch.compile on a CPU."""

    @property
    def name(self) -> str:
        return f"{self.spec.name}/{self.label}/{self.dtype}"

    def implementations(self) -> dict[str, Maker]:
        """Returns `ours` and others by name."""
        spec, shape, others = self.spec, self.shape, self.peers
        if shape.get("docs"):
            others = {
                name: lambda on, maker=maker: spec.call(maker(on), shape, on)
                for name, maker in DOCUMENTS.items()
            }

        def ours(on: str) -> Call:
            """Our kernel where kernels run, else the function that the model calls on a CPU."""
            op = spec.op if on == "cuda" or INTERPRETING else spec.cpu or spec.op
            return spec.call(op, shape, on)

        def compiled(on: str) -> Call:
            if on == "cpu" and not self.against:
                raise UserError("takes 10 to 20 s a case on a CPU: --against compiled")
            end_compile_workers_at_exit()
            return spec.call(torch.compile(spec.eager, dynamic=False), shape, on)

        eager = partial(spec.call, spec.eager, shape)
        found = {"ours": ours, "eager": eager, "compiled": compiled, **others}
        wanted = ("ours", *(self.against or found))
        return {name: maker for name, maker in found.items() if name in wanted}

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
        """Counts the FLOPs and bytes of each pass that the op has."""
        return self.spec.work(self.shape, DTYPES[self.dtype].itemsize)


def cases(
    on: str, op: Names = (), size: Names = (), dtype: Names = (), *,
    against: Names = (), quick: bool = False, full: bool = False,
) -> list[Case]:  # fmt: skip
    """Returns the cases of a kind of device, `cpu` or `cuda`; all that are worth it by default.

    The size `tiny`, the first small problem of each op, is for rehearsals in Triton's interpreter.

    Raises:
        UserError: a name is unknown, or nothing matches.
    """
    libraries = sorted({"eager", "compiled", *DOCUMENTS, *chain(*PEERS.values())})
    for what, names, known in (("op", op, SPECS), ("implementation", against, libraries)):
        for name in names:
            if name not in known:
                raise unknown_name(what, name, known)
    if (tiny := "tiny" in size) and len(size) > 1:
        raise UserError(f"--size is {' '.join(size)}: expected tiny alone")
    usual = ("bf16",) if on == "cuda" else ("bf16", "fp32") if fast_bf16(on) else ("fp32",)

    def sizes(spec: Spec) -> dict[str, Problem]:
        if tiny:
            return {"tiny": next(iter(spec.problems.values()))}
        kinds = (on, f"{on}-full") if full or size else (on,)
        return {label: s for kind in kinds for label, s in spec.sizes.get(kind, {}).items()}

    found = [
        Case(SPECS[name], label, shape, number, PEERS.get(name, {}), against)
        for name in op or SPECS
        for label, shape in sizes(SPECS[name]).items()
        if not size or label in size
        # fp32 is right in Triton's interpreter and fast on a CPU
        for number in dtype or (("fp32",) if tiny else usual)
    ]
    if quick:
        found = [next(same) for _, same in groupby(found, lambda case: case.spec.name)]
    if not found:
        known = sorted({label for name in op or SPECS for label in sizes(SPECS[name])})
        given = f"no case on {on} has --size {' '.join(size) or '(any)'}"
        raise UserError(f"{given}: expected some of {' '.join(known) or 'none, of this op'}")
    return found
