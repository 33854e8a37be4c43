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

from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from fastgpt.config import Config
from fastgpt.data.items import IGNORED
from fastgpt.errors import UserError
from fastgpt.kernels.linear.op import linear as linear_of_one_rank
from fastgpt.model_config import ModelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from fastgpt.block import Attention

SomeTensor = TypeVar("SomeTensor", Tensor, Tensor | None)

SPLIT = {
    "c_attn.weight": 0, "c_attn.bias": 0, "c_fc.weight": 0, "c_fc.bias": 0, "c_proj.weight": 1,
    "wte.weight": 0, "lm_head.weight": 0, "lm_head.bias": 0,
}  # fmt: skip
"""Dimension in which each parameter is cut, by the end of its name; others are on every rank."""


def check_tensor(config: Config) -> None:
    """Raises `UserError` if a setting does not go with `config.parallel.tp` ranks."""
    tp, model = config.parallel.tp, config.model
    given = f"--parallel.tp is {tp}: expected"
    if model.architecture != "gpt":
        raise UserError(f"{given} --model.architecture gpt, not {model.architecture}")
    if model.dropout_at("attention"):
        raise UserError(
            f"{given} --model.attention-dropout 0, not {model.dropout_at('attention')}: the ranks'"
            " heads would have the same masks"
        )
    if config.ops.loss == "chunked":
        raise UserError(f"{given} --ops.loss auto or torch, not chunked")
    for name, size in (
        ("--model.num-heads", model.num_heads),
        ("--model.num-kv-heads", model.kv_heads),
        ("the feed-forward width", model.ffn_width),
        ("the vocabulary, padded to --model.vocab-multiple,", model.padded_vocab),
    ):
        if size % tp:
            raise UserError(f"{given} {name} to be a multiple of it, not {size}")


# --- weights --------------------------------------------------------------------------------------


def share_out(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the parameters of a `GPT` DTensors of `mesh`, in place, and cuts its heads' numbers."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    config = cast(ModelConfig, model.config)
    for name, weight in list(model.named_parameters()):
        cut = SPLIT.get(".".join(name.split(".")[-2:]))
        order = row_order(config, name, mesh.size())
        whole = weight.detach() if order is None else weight.detach()[order]
        placement = Replicate() if cut is None else Shard(cut)
        shared = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(shared))
    for block in cast(nn.ModuleList, model.h):
        attention = cast("Attention", block.attn)
        attention.heads = tuple(n // mesh.size() for n in attention.heads)


def row_order(config: ModelConfig, name: str, ranks: int) -> Tensor | None:
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


def is_sharded(x: object) -> TypeGuard[DTensor]:
    # by name: importing the class takes a second; in compiled code hasattr(x, "to_local") is False
    return type(x).__name__ == "DTensor"


def local(x: SomeTensor, *, partial: bool = False) -> SomeTensor:
    """Returns this rank's part of a parameter, or all of one that is on every rank.

    Args:
        partial: the ranks' gradients differ, and are summed.
    """
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Partial

    own = x.to_local(grad_placements=[Partial()] if partial else None)
    return cast(SomeTensor, own)


# --- activations ----------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x (..., I) @ weight.T (O, I) + bias (O,), with a weight that may be shared out.

    Of rows (O / ranks, I) the result is this rank's part, (..., O / ranks). Of columns x is
    (..., I / ranks), and the result the sum over the ranks, (..., O).
    """
    if not is_sharded(weight):
        return linear_of_one_rank(x, weight, bias)
    if weight.placements[0].is_shard(0):
        return linear_of_one_rank(_entered(x, weight.device_mesh), local(weight), local(bias))
    y = _summed(linear_of_one_rank(x, local(weight)), weight.device_mesh)
    return y if bias is None else y + local(bias).to(y.dtype)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Looks up tokens (B, T) in a table (V, C) whose rows may be shared out: (B, T, C)."""
    if not is_sharded(weight):
        return F.embedding(tokens, weight)
    own, mesh = local(weight), weight.device_mesh
    rows = tokens - mesh.get_local_rank() * len(own)
    outside = (rows < 0) | (rows >= len(own))
    found = F.embedding(rows.masked_fill(outside, 0), own)
    return _summed(found.masked_fill(outside[..., None], 0), mesh)


def joined(y: Tensor, weight: Tensor) -> Tensor:
    """Returns all columns of y, the result of `linear` with this weight; a collective operation."""
    if not is_sharded(weight):
        return y
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(y, weight.device_mesh, [Shard(y.dim() - 1)]).full_tensor()


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
    """`LossOp` that computes the logits of this rank's part of the vocabulary.

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
    own = logits.masked_fill(padding, torch.finfo(logits.dtype).min).logsumexp(-1)
    lse = joined(own[:, None], weight).logsumexp(-1)
    targets = targets.flatten()
    columns = targets - first
    outside = (columns < 0) | (columns >= logits.shape[1])
    chosen = logits.gather(1, columns.masked_fill(outside, 0)[:, None])[:, 0]
    losses = lse - (1 - label_smoothing) * _summed(chosen.masked_fill(outside, 0), mesh)
    if label_smoothing:
        total = _summed(logits.masked_fill(padding, 0).sum(-1), mesh)
        losses = losses - label_smoothing / V * total
    losses = losses + z_loss * lse.square()
    scored = targets != IGNORED
    return losses.masked_fill(~scored, 0).sum() / scored.sum()


def _entered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns x, which is the same on all ranks; the gradient is the sum of theirs."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the sum of the ranks' x; the gradient is that of the sum."""
    from torch.distributed.tensor import DTensor, Partial

    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()
