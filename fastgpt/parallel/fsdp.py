"""Weights, gradients and optimizer state shared out among ranks, by PyTorch's FSDP2.

Each rank keeps some rows of every parameter, as a DTensor. A block's weights are gathered before
they are used; its gradients are averaged and shared out again as soon as they are complete.

With tensor parallelism the ranks of a group compute parts of each layer, of the same tokens: some
heads of attention, some inner features of the feed-forward layers, and some rows of the vocabulary.
The forward uses the local part of a weight, because our kernels know plain tensors only; the sums
over the ranks are in `fastgpt.ops.dtensor`.

FSDP and DTensor are imported when they are used: that takes a second.

Source
    Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism", section 3
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastgpt.config.config import ParallelConfig
from fastgpt.config.model import ModelConfig
from fastgpt.device.device import DTYPES
from fastgpt.model.block import Attention
from fastgpt.model.gpt import GPT, restore_padding
from fastgpt.ops.dtensor import is_sharded, local
from fastgpt.parallel.distributed import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

SPLIT = {
    "c_attn.weight": 0, "c_attn.bias": 0, "c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1,
    "wte.weight": 0, "lm_head.weight": 0, "lm_head.bias": 0,
}  # fmt: skip
"""Dimension in which each parameter is cut, by the end of its name, by tensor-parallel ranks;
others are on every one of them."""


@torch.no_grad()
def shard(
    model: GPT, build: Callable[[], GPT], config: ParallelConfig, mesh: DeviceMesh, world: World
) -> None:
    """Shards a model in place by FSDP2, in a group for each block; a collective operation.

    The model is on the device `meta`, so that no rank holds all of it. It goes to that of the mesh,
    with the weights that `build` makes on the main rank. Gradients are summed in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # a block's output is a view, which only matters to operations in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.dtype] if config.dtype != "fp32" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    if config.tp > 1:
        # it gathers such a weight in two steps, and says that one would be faster
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        cut_layers(model, mesh["tensor"])
        mesh = mesh[(mesh.mesh_dim_names or ())[:-1]]
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    weights: dict[str, Tensor] = {}

    def built_buffers() -> dict[str, Tensor]:
        built = build()
        weights.update(built.named_parameters())
        return dict(built.named_buffers())

    buffers = world.on_rank0(built_buffers, world.long_timeout_group())
    model.to_empty(device=mesh.device_type)
    for name, weight in model.named_parameters():
        order = qkv_permutation(model.config, name, config.tp) if config.tp > 1 else None
        weight.qkv_permutation = order  # pyright: ignore[reportAttributeAccessIssue]
        x = weights.pop(name) if world.is_main else torch.empty(weight.shape, device=weight.device)
        local(weight).copy_(local(shard_like(x, weight, source=0)))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def cut_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Shards the parameters as DTensors over tensor-parallel ranks, and divides the heads.

    The model is on the device `meta`: no rows change places, see `qkv_permutation`.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name, weight in list(model.named_parameters()):
        cut = SPLIT.get(".".join(name.split(".")[-2:]))
        placement = Replicate() if cut is None else Shard(cut)
        shared = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(shared))
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.heads = tuple(n // mesh.size() for n in layer.heads)


def qkv_permutation(config: ModelConfig, name: str, ranks: int) -> Tensor | None:
    """Returns the rows of a packed projection in the order of the ranks, (rows,) int64.

    Cut into as many parts, they are each rank's queries, keys and values, or its gate and the
    features that this scales. None: the parameter is not packed.
    """
    H, K, D, F = config.num_heads, config.kv_heads, config.head_dim, config.ffn_width
    packed: dict[str, tuple[int, ...]] = {"c_attn": (H * D, K * D, K * D)}
    if config.activation == "swiglu":
        packed["c_fc"] = (F, F)
    sizes = packed.get(name.split(".")[-2])
    if sizes is None:
        return None
    pieces = [rows.chunk(ranks) for rows in torch.arange(sum(sizes)).split(sizes)]
    return torch.cat([piece[rank] for rank in range(ranks) for piece in pieces])


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context in which the backward of a sharded model keeps its gradients on their rank."""
    sharded = cast("FSDPModule", model)
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


def full_tensor(x: Tensor, like: Tensor) -> Tensor:
    """Returns the full tensor of `x`, sharded as the parameter `like` is; a collective operation.

    Its rows are in the model's order, which tensor-parallel ranks may have changed: see
    `qkv_permutation`.
    """
    if not is_sharded(x):
        return x
    order = getattr(like, "qkv_permutation", None)
    return x.full_tensor() if order is None else x.full_tensor()[order.argsort()]


def gathered(x: Tensor, like: Tensor) -> Tensor:
    """Returns a whole copy of `x` in host memory on the main rank, and an empty tensor on others.

    If the parameter `like`, to which it belongs, is no DTensor, `x` is returned as it is.
    """
    if not is_sharded(like):
        return x
    full = full_tensor(x, like)
    return full.to("cpu", copy=True) if like.device_mesh.get_rank() == 0 else torch.empty(0)


def shard_like(x: Tensor, like: Tensor, source: int | None = None) -> Tensor:
    """Shards `x`, which is whole on every rank, as the parameter `like` is.

    With a `source` the values are those of that rank of the mesh; a collective operation.
    """
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    order = getattr(like, "qkv_permutation", None)
    x = x.to(like.device)
    x = x if order is None else x[order]
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=source)


@torch.no_grad()
def load_weights(model: GPT, weights: Mapping[str, Tensor]) -> None:
    """Loads whole weights, of which each rank may keep a part, into a model."""
    if not any(map(is_sharded, model.parameters())):
        model.load_state_dict(weights)
        return
    for name, weight in model.named_parameters():
        padded = {name: weights[name]}
        restore_padding(model, padded, "")
        local(weight).copy_(local(shard_like(padded[name], weight)))


def sum_over_shards(x: Tensor, like: Tensor) -> Tensor:
    """Sums `x` in place over the ranks that hold the parts of `like`; a collective operation."""
    if is_sharded(like):
        for name in like.device_mesh.mesh_dim_names or ():
            if name != "replicate":
                dist.all_reduce(x, group=like.device_mesh.get_group(name))
    return x


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each whole tensor, (n,); a collective operation."""
    parts = torch._foreach_norm([local(x) for x in tensors])  # pyright: ignore
    if not is_sharded(tensors[0]):
        return torch.stack(parts)
    mesh = tensors[0].device_mesh
    # tensor-parallel ranks may all hold the same part
    copies = mesh.size(-1) if "tensor" in (mesh.mesh_dim_names or ()) else 1
    same = [is_sharded(x) and x.placements[-1].is_replicate() for x in tensors]
    torch._foreach_mul_(parts, [copies**-0.5 if x else 1.0 for x in same])  # pyright: ignore
    return sum_over_shards(torch.stack(parts).square(), tensors[0]).sqrt()
