"""Counts the memory of a training step by shapes alone, on tensors without storage.

Attention and norms are our kernels, whose launches are recorded instead of run. Every buffer counts
from its allocation to its last reference.
"""

import gc
import weakref
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastgpt.config.config import OpsConfig
from fastgpt.kernels.cross_entropy import chunks
from fastgpt.kernels.runtime import H100_BYTES, recording
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside: `now` and the largest, `peak`.

    Recorded launches hold their arguments, so they are dropped at once.
    """

    def __init__(self, launches) -> None:
        super().__init__()
        self.launches, self.sizes, self.now, self.peak = launches, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches.clear()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


class MemoryUse(NamedTuple):
    """Bytes of the weights, of the tensors that the forward saves, and of the peak."""

    weights: int
    saved: int
    peak: int


def memory_use(config, batch, loss, recompute="none") -> MemoryUse:
    """Runs one step of `batch` full sequences in bf16 autocast, with a loss of `OpsConfig`."""
    on_h100 = 2 * H100_BYTES // chunks.GPU_SHARE  # logits are counted there as fp32
    ops = tables.select(OpsConfig(attention="triton", kernels="triton", loss=loss), "cpu")
    with (
        mock.patch.object(chunks, "CPU_BYTES", on_h100),
        recording(90) as launches,
        FakeTensorMode(),
        LiveBytes(launches) as live,
    ):
        model = GPT(config, ops, recompute=recompute)
        gc.collect()
        weights = live.peak = live.now
        tokens = torch.zeros(batch, config.context, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            result = model(tokens, tokens)
        saved = live.now - weights
        result.backward()
        return MemoryUse(weights, saved, live.peak)
