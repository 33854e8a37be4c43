"""Weights, gradients and optimizer state shared out among ranks, by PyTorch's FSDP2.

Each rank keeps some rows of every parameter, as a DTensor. A block's weights are gathered before
they are used; its gradients are averaged and shared out again as soon as they are complete.

FSDP and DTensor are imported when they are used: that takes a second.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastgpt.config import Config, ParallelConfig
from fastgpt.distributed import World
from fastgpt.errors import UserError
from fastgpt.model import GPT, restore_padding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_combination(config: Config, precision: str) -> None:
    """Raises `UserError` if a setting does not go with shared weights."""
    if precision == "fp16" or config.train.eval_tasks:
        raise UserError(
            f"--parallel.kind is {config.parallel.kind}: expected --train.precision bf16 or"
            " fp32, and no --train.eval-tasks"
        )
    if config.parallel.dtype == "bf16" and precision != "bf16":
        raise UserError(
            f"--parallel.dtype is bf16: expected --train.precision bf16, which is {precision} here"
        )


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    config: ParallelConfig,
    *,
    world: World,
    device: str,
    gradients: str,
) -> None:
    """Shares out a model's parameters in place: those of each block, and the rest, together.

    Args:
        device: type of device that they are moved to.
        gradients: number format in which gradients are summed, fp32 or bf16.

    Raises:
        UserError: the ranks do not divide into the groups of hsdp.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # a block's output is a view, which only matters to operations in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.dtype] if config.dtype != "fp32" else None,
        reduce_dtype=DTYPES[gradients],
        cast_forward_inputs=False,
    )
    mesh = _mesh(config, world, device)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def ranks_of_a_model(config: ParallelConfig, world: World) -> int:
    """Returns the number of ranks that hold one copy of the model together.

    Raises:
        UserError: the ranks do not divide into the groups of hsdp.
    """
    if config.kind == "ddp":
        return 1
    group = world.size
    if config.kind == "hsdp" and world.size > 1:
        group = config.shards or int(os.environ["LOCAL_WORLD_SIZE"])
    if world.size % group:
        raise UserError(
            f"--parallel.shards is {group}: expected a divisor of the number of ranks, {world.size}"
        )
    return group


def peers(config: ParallelConfig, world: World) -> int:
    """Returns the number of neighbouring ranks that read the same data.

    Raises:
        UserError: the ranks do not divide into such groups.
    """
    if world.size % config.cp:
        raise UserError(
            f"--parallel.cp is {config.cp}: expected a divisor of the number of ranks, {world.size}"
        )
    return config.cp


def _mesh(config: ParallelConfig, world: World, device: str) -> DeviceMesh:
    """Arranges the ranks: all in a line, or for hsdp in groups that hold the whole model each."""
    from torch.distributed.device_mesh import init_device_mesh

    group = ranks_of_a_model(config, world)
    shape, names = (world.size // group, group), ("replicate", "shard")
    first = 1 if config.kind == "fsdp" else 0  # fsdp has a single group
    return init_device_mesh(device, shape[first:], mesh_dim_names=names[first:])


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Context in which the backward of a sharded model keeps its gradients on their rank."""
    sharded = cast("FSDPModule", model)
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


# --- parts and wholes -----------------------------------------------------------------------------


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    return hasattr(x, "to_local")


def part(x: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, in the same memory; of a plain one all of it."""
    return x.to_local() if is_sharded(x) else x


def whole(x: Tensor) -> Tensor:
    """Returns all of a tensor; a collective operation."""
    return x.full_tensor() if is_sharded(x) else x


def part_like(x: Tensor, like: Tensor) -> Tensor:
    """Shares out a whole tensor, which every rank has, as `like` is; without communication."""
    if is_sharded(x) or not is_sharded(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    x = x.to(like.device)
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def load_weights(model: GPT, weights: Mapping[str, Tensor]) -> None:
    """Loads whole weights, of which each rank may keep a part, into a model."""
    if not any(map(is_sharded, model.parameters())):
        model.load_state_dict(weights)
        return
    for name, weight in model.named_parameters():
        padded = {name: weights[name]}
        restore_padding(model, padded, "")
        part(weight).copy_(part(part_like(padded[name], weight)))


def sum_over_parts(x: Tensor, like: Tensor) -> Tensor:
    """Sums `x` in place over the ranks that hold the parts of `like`; a collective operation."""
    if is_sharded(like):
        dist.all_reduce(x, group=like.device_mesh.get_group("shard"))
    return x


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each whole tensor, (n,); a collective operation."""
    found = torch.stack(torch._foreach_norm([part(x) for x in tensors]))  # pyright: ignore
    if is_sharded(tensors[0]):
        return sum_over_parts(found.square(), tensors[0]).sqrt()
    return found
