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

from fastgpt.config.config import Config, ParallelConfig
from fastgpt.device.device import compile_options
from fastgpt.errors import UserError
from fastgpt.model.build import build_model
from fastgpt.model.context_split import ContextShard
from fastgpt.model.gpt import GPT
from fastgpt.ops.dtensor import linear_cross_entropy
from fastgpt.ops.protocols import Ops
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


BUCKET_MB = 25
"""Size in MiB of the pieces in which ranks exchange gradients, while the backward goes on."""


def model_parallel_size(config: ParallelConfig, world: World) -> int:
    """Returns the number of neighbouring ranks that read the same data."""
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


def group_size(config: ParallelConfig, world: World) -> int:
    """Returns the number of ranks in a group of hsdp; all ranks, if there is a single group."""
    group = world.size
    if config.kind == "hsdp" and world.size > 1:
        group = config.shards or world.local_size
    given = f"--parallel.kind {config.kind} makes groups of {group} ranks"
    if world.size % group:
        raise UserError(f"{given}: expected a divisor of the number of ranks, {world.size}")
    if group % model_parallel_size(config, world):
        raise UserError(
            f"{given}: expected a multiple of --parallel.cp x --parallel.tp,"
            f" {config.cp * config.tp}"
        )
    return group


def build_mesh(config: ParallelConfig, world: World, device: str) -> DeviceMesh:
    """Returns the mesh of all ranks, of which each dimension that is not needed is left out."""
    from torch.distributed.device_mesh import init_device_mesh

    group = group_size(config, world)
    shape = {"replicate": world.size // group, "shard": group // config.tp, "tensor": config.tp}
    if config.kind != "hsdp":  # it has a single group
        del shape["replicate"]
    if config.tp == 1:
        del shape["tensor"]
    return init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))


def check_combination(config: Config, precision: str) -> None:
    """Raises `UserError` if a setting does not go with the kinds of parallelism."""
    parallel, model = config.parallel, config.model
    cp, tp, sharded = parallel.cp, parallel.tp, parallel.kind != "ddp"
    dropout = model.dropout_at("attention")
    gpt = f"--model.architecture gpt, not {model.architecture}"
    for wrong, given, expected in (
        (sharded and precision == "fp16", "kind", "--train.precision bf16 or fp32"),
        (sharded and parallel.dtype == "bf16" and precision != "bf16", "dtype",
         f"--train.precision bf16, which is {precision} here"),
        (cp > 1 and not model.is_gpt, "cp", gpt),
        (model.context % (2 * cp) and cp > 1, "cp",
         f"--model.context to be a multiple of {2 * cp}, not {model.context}"),
        (tp > 1 and not model.is_gpt, "tp", gpt),
        (tp > 1 and dropout, "tp", "--model.dropout-places without attention: the ranks' heads"
         " would have the same masks"),
        (tp > 1 and config.ops.loss == "chunked", "tp", "--ops.loss auto or torch, not chunked"),
        *((size % tp, "tp", f"{name} to be a multiple of it, not {size}") for name, size in (
            ("--model.num-heads", model.num_heads),
            ("--model.num-kv-heads", model.kv_heads),
            ("the feed-forward width", model.ffn_width),
            ("the vocabulary, padded to --model.vocab-multiple,", model.padded_vocab),
        )),
    ):  # fmt: skip
        if wrong:
            value = getattr(parallel, given)
            raise UserError(f"--parallel.{given} is {value}: expected {expected}")


def tensor_parallel(ops: Ops) -> Ops:
    """Returns ops whose loss takes the parts of the vocabulary that tensor-parallel ranks have."""
    return replace(ops, loss=linear_cross_entropy, names=ops.names | {"loss": "torch"})


# --- the model ------------------------------------------------------------------------------------


def build_parallel_model(
    config: Config, ops: Ops, world: World, device: str, *, residual_dtype: torch.dtype | None,
    compiled: bool,
) -> GPT:  # fmt: skip
    """Builds the model with the numbers of `config.seed`; a collective operation.

    If it is to be `compiled` and ranks share weights, its blocks are, one by one.
    """
    parallel = config.parallel
    sharded = shards_weights(parallel, world)
    mesh = build_mesh(parallel, world, device) if sharded or world.model_parallel_size > 1 else None
    options: dict[str, Any] = {
        "z_loss": config.train.z_loss,
        "recompute": config.train.recompute,
        "residual_dtype": residual_dtype,
    }
    if mesh is not None and parallel.cp > 1:
        groups = mesh["shard"].size() // parallel.cp
        number = (mesh.mesh_dim_names or ()).index("shard")  # PyTorch 2.11 refuses the name
        group = mesh._unflatten(number, (groups, parallel.cp), ("data", "context"))["context"]
        options["cp_shard"] = ContextShard(group.get_local_rank(), group.size(), group.get_group())

    def build_full_model() -> GPT:
        torch.manual_seed(config.seed)
        return build_model(config.model, ops, **options)

    if mesh is None or not sharded:
        return build_full_model().to(device)
    with torch.device("meta"):
        model = build_full_model()
    if compiled:  # as a whole it has FSDP's hooks, which are not compiled
        compile_blocks(model, device)
    shard(model, build_full_model, parallel, mesh, world)
    return model


def compile_blocks(model: GPT, device: str) -> None:
    """Compiles the blocks one by one: as a whole the model would give all gradients at the end."""
    for block in model.h:
        block.compile(fullgraph=True, dynamic=False, options=compile_options(device, "on"))


def replicate(module: nn.Module, config: ParallelConfig) -> DistributedDataParallel:
    """Wraps `module`, so that its backward averages the gradients of all ranks."""
    known = inspect.signature(DistributedDataParallel).parameters
    # newer versions of PyTorch renamed the option to not sync buffers
    syncs = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, syncs: False}
    if "batched_grad_copy" in known:  # two kernels for a bucket instead of one for each gradient
        options["batched_grad_copy"] = True
    replica = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, **options)
    if config.dtype == "bf16":
        # by its own name DDP refuses the hook on CPUs
        in_bf16 = lambda group, bucket: bf16_compress_hook(group, bucket)  # noqa: E731
        replica.register_comm_hook(dist.group.WORLD, in_bf16)
    return replica
