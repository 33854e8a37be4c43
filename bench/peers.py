"""Implementations of each op by other libraries, adapted to our arguments.

A peer is a function of the device, `cpu` or `cuda`, that returns the callable or raises
`MissingError` with the reason why it cannot run here. A library is imported when it is first used.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.device.device import end_compile_workers_at_exit, has_compiler

Maker = Callable[[str], Callable[..., Any]]


class MissingError(Exception):
    """The reason why a peer cannot run here."""


def always(call: Callable[..., Any]) -> Maker:
    """Wraps an implementation that runs on every device."""
    return lambda on: call


def needs(module: str, package: str, *, cuda: bool = True) -> Callable[[str], Any]:
    """Returns a function that imports a module, or raises `MissingError` with its package."""

    def load(on: str) -> Any:
        if cuda and on != "cuda":
            raise MissingError("needs CUDA")
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise MissingError(f"{package} is not installed ({error})") from error

    return load


# --- torch.compile --------------------------------------------------------------------------------

COMPILE_ON_CPU = False
"""True with `--compiled`: also time torch.compile on a CPU, which takes 10 to 20 s per case."""


def compiled(reference: Callable[..., Any]) -> Maker:
    """Returns the plain reference compiled by torch.compile."""

    def make(on: str) -> Callable[..., Any]:
        if on == "cpu" and not COMPILE_ON_CPU:
            raise MissingError(
                "not asked for on a CPU (10 to 20 s of compiling a case): --compiled"
            )
        if not has_compiler():
            raise MissingError("no C++ compiler was found (CXX, g++, clang++)")
        end_compile_workers_at_exit()
        return torch.compile(reference, dynamic=False)

    return make


# --- attention: (B, T, H, D) each -> (B, T, H, D), causal -----------------------------------------


def sdpa(backend: str) -> Maker:
    """F.scaled_dot_product_attention restricted to one backend: flash, cudnn or efficient."""

    def make(on: str) -> Callable[..., Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if on == "cpu" and backend != "flash":
            raise MissingError("needs CUDA")
        name = {"flash": "FLASH", "cudnn": "CUDNN", "efficient": "EFFICIENT"}[backend]
        chosen = getattr(SDPBackend, f"{name}_ATTENTION")

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(chosen):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return call

    return make


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
        attend = needs("torch.nn.attention.varlen", "PyTorch 2.13")(on).varlen_attn
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


def flash_attn(module: str, package: str) -> Maker:
    """Attention of the package flash-attn, in the generation whose module is named."""

    def make(on: str) -> Callable[..., Tensor]:
        attend = needs(module, package)(on).flash_attn_func

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(q, k, v, causal=True)
            return out[0] if isinstance(out, tuple) else out

        return call

    return make


def sdpa_decoding(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """F.scaled_dot_product_attention over caches that are full."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def flash_attn_decoding(module: str, package: str) -> Maker:
    """flash-attn's attention over a cache, one new token for each sequence."""

    def make(on: str) -> Callable[..., Tensor]:
        attend = needs(module, package)(on).flash_attn_with_kvcache

        def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
            out = attend(q, k, v, cache_seqlens=lengths)
            return out[0] if isinstance(out, tuple) else out

        return call

    return make


def packed(maker: Maker) -> Maker:
    """Wraps attention for one tensor (B, T, 3 H, D): it gets the slices as views."""

    def make(on: str) -> Callable[..., Tensor]:
        attend = maker(on)
        return lambda qkv: attend(*qkv.chunk(3, dim=2))

    return make


ATTENTION: dict[str, Maker] = {
    "sdpa-flash": sdpa("flash"),
    "sdpa-cudnn": sdpa("cudnn"),
    "sdpa-efficient": sdpa("efficient"),
    "flex": flex,
    "flash-attn-2": flash_attn("flash_attn", "flash-attn 2"),
    "flash-attn-3": flash_attn("flash_attn_interface", "flash-attn 3"),
    "flash-attn-4": flash_attn("flash_attn.cute", "flash-attn 4"),
}
DOCUMENTS: dict[str, Maker] = {"flex": flex, "varlen": varlen}
"""Attention within documents, given as `doc_ids` (B, T)."""


def chunked_cross_entropy(on: str) -> Callable[..., Tensor]:
    """F.linear_cross_entropy in chunks of tokens and vocabulary, as PyTorch chooses them."""
    if on != "cuda":
        raise MissingError("needs CUDA: on a CPU it took ten times as long as eager")
    try:
        options = torch.nn.LinearCrossEntropyOptions()
        loss = F.linear_cross_entropy
    except AttributeError as error:
        raise MissingError("needs PyTorch 2.13") from error
    return functools.partial(loss, options=options)


# --- Liger ----------------------------------------------------------------------------------------


def liger(module: str, function: str, *after: Any) -> Maker:
    """Wraps an autograd function of the package liger-kernel.

    `after` holds the number of results to keep (None: all), then the constant arguments.
    """
    keep, *constants = after

    def make(on: str) -> Callable[..., Any]:
        found = needs(f"liger_kernel.ops.{module}", "liger-kernel")(on)
        apply = getattr(found, function).apply

        def call(*inputs: Tensor) -> Any:
            out = apply(*inputs, *constants)
            return out if keep is None else out[0] if keep == 1 else out[:keep]

        return call

    return make
