"""How ranks are arranged: the dimensions of one `DeviceMesh` are the kinds of parallelism.

Of neighbouring ranks, those that share layers (`tensor`) are nearest; then come those that share
sequences (`context`), those that share out weights (`shard`, which contains `context`), and groups
of them that hold the whole model each (`replicate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastgpt.config.config import Config, ParallelConfig
from fastgpt.errors import UserError
from fastgpt.model.context_split import ContextShard
from fastgpt.parallel.distributed import World

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
