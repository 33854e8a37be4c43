"""PyTorch's DDP around the model: how the ranks average their gradients."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fastgpt.config.config import TrainConfig


def replicate(module: nn.Module, config: TrainConfig) -> DistributedDataParallel:
    """Wraps `module`, so that its backward averages the gradients of all ranks."""
    known = inspect.signature(DistributedDataParallel).parameters
    # newer versions of PyTorch renamed the option to not sync buffers
    syncs = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, syncs: False}
    if "batched_grad_copy" in known:  # two kernels for a bucket instead of one for each gradient
        options["batched_grad_copy"] = True
    replica = DistributedDataParallel(module, bucket_cap_mb=config.ddp_bucket_mb, **options)
    if config.ddp_dtype == "bf16":
        replica.register_comm_hook(dist.group.WORLD, _in_bf16)
    return replica


def _in_bf16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[Tensor]:
    """Calls PyTorch's hook, which DDP refuses by its name on CPUs."""
    return bf16_compress_hook(group, bucket)
