"""The model of one rank, whole or a part, as the config's kinds of parallelism share it out."""

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fastgpt.config.config import Config, TrainConfig
from fastgpt.device.device import compile_options
from fastgpt.model.build import build_model
from fastgpt.model.gpt import GPT
from fastgpt.ops.protocols import Ops
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import shard
from fastgpt.parallel.mesh import build_mesh, check_context, shards_weights, split_context
from fastgpt.parallel.tensor import check_tensor, linear_cross_entropy


def build_parallel_model(
    config: Config, ops: Ops, world: World, device: str, *, narrow_residual: bool, compiled: bool
) -> GPT:
    """Builds the model with the numbers of `config.seed`; a collective operation.

    Args:
        compiled: its blocks will be compiled, one by one, if ranks share weights.

    Raises:
        UserError: the settings do not go together, or with the number of ranks.
    """
    parallel = config.parallel
    sharded = shards_weights(parallel, world)
    if sharded:  # a norm would need the bias of a block whose weights are shared out again
        ops = replace(ops, norms=replace(ops.norms, fuses_bias_grad=False))
    if parallel.tp > 1:
        check_tensor(config)
        ops = replace(ops, loss=linear_cross_entropy, names=ops.names | {"loss": "torch"})
    if parallel.cp > 1:
        check_context(config)
    mesh = build_mesh(parallel, world, device) if sharded or world.non_dp_size > 1 else None
    options: dict[str, Any] = {
        "label_smoothing": config.train.label_smoothing,
        "z_loss": config.train.z_loss,
        "recompute": config.train.recompute,
        "narrow_residual": narrow_residual,
        "cp_shard": None if mesh is None or parallel.cp == 1 else split_context(parallel.cp, mesh),
    }

    def whole() -> GPT:
        torch.manual_seed(config.seed)
        return build_model(config.model, ops, **options)

    if mesh is None or not sharded:
        return whole().to(device)
    with torch.device("meta"):
        model = whole()
    if compiled:  # as a whole it has FSDP's hooks, which are not compiled
        compile_blocks(model, device)
    shard(model, whole, parallel, mesh, world, gradients=config.train.ddp_dtype)
    return model


def compile_blocks(model: GPT, device: str) -> None:
    """Compiles the blocks one by one: as a whole the model would give all gradients at the end."""
    for block in model.h:
        block.compile(fullgraph=True, dynamic=False, options=compile_options(device, "on"))


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
        # by its own name DDP refuses the hook on CPUs
        in_bf16 = lambda group, bucket: bf16_compress_hook(group, bucket)  # noqa: E731
        replica.register_comm_hook(dist.group.WORLD, in_bf16)
    return replica
