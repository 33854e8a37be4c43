"""How ranks are arranged, and the model of one rank, whole or a part.

The dimensions of one `DeviceMesh` are the kinds of parallelism. Of neighbouring ranks, those that
share layers (`tensor`) are nearest; then come those that share sequences (`context`), those that
share out weights (`shard`, which contains `context`), and groups of them that hold the whole model
each (`replicate`).
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fastgpt.config.config import Config, ParallelConfig, TrainConfig
from fastgpt.device.device import compile_options
from fastgpt.errors import UserError
from fastgpt.model.build import build_model
from fastgpt.model.context_split import ContextShard
from fastgpt.model.gpt import GPT
from fastgpt.ops.protocols import Ops
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import shard
from fastgpt.parallel.tensor import check_tensor, linear_cross_entropy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def non_dp_size(config: ParallelConfig, world: World) -> int:
    """Returns the number of neighbouring ranks that read the same data.

    Raises:
        UserError: the ranks do not divide into such groups.
    """
    group = config.cp * config.tp
    if world.size % group:
        raise UserError(
            f"--parallel.cp x --parallel.tp is {group}: expected a divisor of the number of ranks,"
            f" {world.size}"
        )
    return group


def shards_weights(config: ParallelConfig, world: World) -> bool:
    """Returns True if each rank holds only a shard of each weight: fsdp and hsdp, several ranks."""
    return config.kind != "ddp" and world.size > 1


def model_ranks(config: ParallelConfig, world: World) -> int:
    """Returns the number of ranks that hold one copy of the model together.

    Raises:
        UserError: the ranks do not divide into the groups of hsdp.
    """
    if config.kind == "ddp":
        return 1
    group = world.size
    if config.kind == "hsdp" and world.size > 1:
        group = config.shards or world.local_size
    given = f"--parallel.kind {config.kind} makes groups of {group} ranks"
    if world.size % group:
        raise UserError(f"{given}: expected a divisor of the number of ranks, {world.size}")
    if group % non_dp_size(config, world):
        raise UserError(
            f"{given}: expected a multiple of --parallel.cp x --parallel.tp,"
            f" {config.cp * config.tp}"
        )
    return group


def build_mesh(config: ParallelConfig, world: World, device: str) -> DeviceMesh:
    """Returns the mesh of all ranks, of which each dimension that is not needed is left out.

    Raises:
        UserError: the ranks do not divide into the groups of hsdp.
    """
    from torch.distributed.device_mesh import init_device_mesh

    group = world.size if config.kind == "ddp" else model_ranks(config, world)
    shape = {"replicate": world.size // group, "shard": group // config.tp, "tensor": config.tp}
    if config.kind != "hsdp":  # it has a single group
        del shape["replicate"]
    if config.tp == 1:
        del shape["tensor"]
    return init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))


def check_context(config: Config) -> None:
    """Raises `UserError` if a setting does not go with `config.parallel.cp` ranks."""
    given, context = f"--parallel.cp is {config.parallel.cp}: expected", config.model.context
    if config.model.architecture != "gpt" or config.train.eval_tasks:
        raise UserError(f"{given} model.architecture gpt, and no --train.eval-tasks")
    if context % (least := 2 * config.parallel.cp):
        raise UserError(f"{given} --model.context to be a multiple of {least}, not {context}")


def split_context(cp: int, mesh: DeviceMesh) -> ContextShard:
    """Returns this rank's part of sequences that `cp` ranks of a mesh share."""
    groups = mesh["shard"].size() // cp
    number = (mesh.mesh_dim_names or ()).index("shard")  # PyTorch 2.11 refuses the name
    context = mesh._unflatten(number, (groups, cp), ("data", "context"))["context"]
    return ContextShard(context.get_local_rank(), context.size(), context.get_group())


# --- the model ------------------------------------------------------------------------------------


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
