"""Computes the peak memory of a training step from shapes alone: `python -m bench.memory [recipe]`.

Forward and backward run on tensors without storage, in bf16 autocast and uncompiled, with attention
and norms by our kernels, whose launches are recorded instead of run. Every buffer counts from its
allocation to its last reference. The GPU's own caching, the libraries' workspaces and AdamW's two
moments, 8 bytes for each weight, come on top. torch.compile removes some of the copies of the
logits that the unchunked form makes.
"""

import gc
import weakref
from dataclasses import dataclass, replace
from typing import Annotated, Any
from unittest import mock

import torch
import tyro
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import records
from fastgpt import flags
from fastgpt.config.config import OpsConfig, Recompute
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.kernels.cross_entropy import chunks
from fastgpt.kernels.runtime import H100_BYTES, Launch, recording
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside: `now` and the largest, `peak`.

    Recorded launches hold their arguments, so they are dropped at once.
    """

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.launches.clear()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the weights, of the tensors that the forward saves, and of the peak."""

    weights: int
    saved: int
    peak: int


def memory_use(
    config: ModelConfig,
    batch: int,
    loss: str,
    dtype: torch.dtype = torch.float32,
    *,
    recompute: Recompute = "none",
) -> MemoryUse:
    """Runs one step of `batch` full sequences.

    Args:
        loss: as in `OpsConfig`.
        dtype: number format of the weights.
        recompute: as in `GPT`.
    """
    on_h100 = 2 * H100_BYTES // chunks.GPU_SHARE  # logits are counted there as fp32
    asked = OpsConfig(attention="triton", norm="triton", loss=loss)  # pyright: ignore
    with (
        mock.patch.object(chunks, "CPU_BYTES", on_h100),
        recording(90) as launches,
        FakeTensorMode(),
        LiveBytes(launches) as live,
    ):
        model = GPT(config, tables.select(asked, "cpu"), recompute=recompute)
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)
        gc.collect()
        weights = live.peak = live.now
        tokens = torch.zeros(batch, config.context, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            result = model(tokens, tokens)
        saved = live.now - weights
        result.backward()
        return MemoryUse(weights, saved, live.peak)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Prints the peak memory of a training step with each implementation of the loss."""

    recipe: Annotated[str, tyro.conf.Positional] = "gpt2-124m"
    """Recipe of the network."""
    batch: int = 64
    """Number of sequences in a step."""


def main(argv: list[str]) -> None:
    asked = flags.parse(Memory, argv, prog="python -m bench.memory")
    if asked.recipe not in RECIPES:
        raise unknown_name("recipe", asked.recipe, RECIPES)
    if asked.batch < 1:
        raise UserError(f"--batch is {asked.batch}: expected 1 or more")
    config = RECIPES[asked.recipe][1].model
    config = replace(config, vocab_size=config.vocab_size or 256)  # bytes
    lines = []
    for loss in ("torch", "chunked"):
        found = memory_use(config, asked.batch, loss)
        figures = (found.weights, found.saved, found.peak)
        lines.append((loss, *(f"{n / 2**30:.3f}" for n in figures)))
    records.show("loss|weights, GiB|kept for the backward|peak", lines)


if __name__ == "__main__":
    run_command(main)
