"""Tensor parallelism: the ranks of a group compute parts of each layer, of the same tokens.

Each rank has some heads of attention, some inner features of the feed-forward layers, and some rows
of the vocabulary in the embedding and the output head. What enters such a part is the same on all
ranks, so their gradients of it are summed; what leaves it is summed. The rest is on every rank.

Weights are DTensors, of which the forward uses the local part: our kernels know plain tensors only.

Source
    Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism", section 3
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fastgpt.config.model import ModelConfig
from fastgpt.data.items import IGNORED
from fastgpt.ops.dtensor import all_gather, is_sharded, linear, reduce_from_tp

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fastgpt.model.block import Attention


SPLIT = {
    "c_attn.weight": 0, "c_attn.bias": 0, "c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1,
    "wte.weight": 0, "lm_head.weight": 0, "lm_head.bias": 0,
}  # fmt: skip
"""Dimension in which each parameter is cut, by the end of its name; others are on every rank."""


# --- weights --------------------------------------------------------------------------------------


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the parameters of a `GPT` as DTensors over `mesh`, in place, and divides its heads.

    It is on the device `meta`: no rows change places, see `qkv_permutation`.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name, weight in list(model.named_parameters()):
        cut = SPLIT.get(".".join(name.split(".")[-2:]))
        placement = Replicate() if cut is None else Shard(cut)
        shared = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(shared))
    for block in cast(nn.ModuleList, model.h):
        attention = cast("Attention", block.attn)
        attention.heads = tuple(n // mesh.size() for n in attention.heads)


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


# --- activations ----------------------------------------------------------------------------------


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    valid_vocab: int | None = None,
) -> Tensor:
    """`Ops.loss` that computes the logits of this rank's part of the vocabulary.

    The ranks exchange a few numbers for each token, not logits.
    """
    assert is_sharded(weight)
    mesh, V = weight.device_mesh, weight.shape[0] if valid_vocab is None else valid_vocab
    logits = linear(x, weight, bias).float().flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    first = mesh.get_local_rank() * logits.shape[1]
    padding = torch.arange(logits.shape[1], device=x.device) + first >= V
    # finite, because a rank may have padding only, whose log-sum-exp must have a gradient
    local_lse = logits.masked_fill(padding, torch.finfo(logits.dtype).min).logsumexp(-1)
    lse = all_gather(local_lse[:, None], weight).logsumexp(-1)
    targets = targets.flatten()
    columns = targets - first
    outside = (columns < 0) | (columns >= logits.shape[1])
    chosen = logits.gather(1, columns.masked_fill(outside, 0)[:, None])[:, 0]
    losses = lse - (1 - label_smoothing) * reduce_from_tp(chosen.masked_fill(outside, 0), mesh)
    if label_smoothing:
        total = reduce_from_tp(logits.masked_fill(padding, 0).sum(-1), mesh)
        losses = losses - label_smoothing / V * total
    losses = losses + z_loss * lse.square()
    scored = targets != IGNORED
    return losses.masked_fill(~scored, 0).sum() / scored.sum()
