"""Weights that may be cut over tensor-parallel ranks (DTensors), and layers that use them.

A rank computes with its local part; sums and gathers over the ranks are those of DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from fastgpt.kernels.linear.op import linear as linear_of_one_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

SomeTensor = TypeVar("SomeTensor", Tensor, Tensor | None)


def is_sharded(x: object) -> TypeGuard[DTensor]:
    # by name: importing the class takes a second; in compiled code hasattr(x, "to_local") is False
    return type(x).__name__ == "DTensor"


def local(x: SomeTensor, *, partial: bool = False) -> SomeTensor:
    """Returns this rank's part of a tensor, in the same memory, or all of one that is no DTensor.

    With `partial` the ranks' gradients differ, and are summed.
    """
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Partial

    shard = x.to_local(grad_placements=[Partial()] if partial else None)
    return cast(SomeTensor, shard)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x (..., I) @ weight.T (O, I) + bias (O,), with a weight that may be shared out.

    Of rows (O / ranks, I) the result is this rank's part, (..., O / ranks). Of columns x is
    (..., I / ranks), and the result the sum over the ranks, (..., O).
    """
    if not is_sharded(weight):
        return linear_of_one_rank(x, weight, bias)
    if weight.placements[0].is_shard(0):
        return linear_of_one_rank(copy_to_tp(x, weight.device_mesh), local(weight), local(bias))
    y = reduce_from_tp(linear_of_one_rank(x, local(weight)), weight.device_mesh)
    return y if bias is None else y + local(bias).to(y.dtype)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Looks up tokens (B, T) in a table (V, C) whose rows may be shared out: (B, T, C)."""
    if not is_sharded(weight):
        return F.embedding(tokens, weight)
    shard, mesh = local(weight), weight.device_mesh
    rows = tokens - mesh.get_local_rank() * len(shard)
    outside = (rows < 0) | (rows >= len(shard))
    found = F.embedding(rows.masked_fill(outside, 0), shard)
    return reduce_from_tp(found.masked_fill(outside[..., None], 0), mesh)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, z_loss: float = 0.0,
    softcap: float | None = None, valid_vocab: int | None = None,
) -> Tensor:  # fmt: skip
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
    losses = lse - reduce_from_tp(chosen.masked_fill(outside, 0), mesh) + z_loss * lse.square()
    scored = targets != -100
    return losses.masked_fill(~scored, 0).sum() / scored.sum()


def all_gather(y: Tensor, weight: Tensor) -> Tensor:
    """Returns all columns of y, the result of `linear` with this weight; a collective operation."""
    if not is_sharded(weight):
        return y
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(y, weight.device_mesh, [Shard(y.dim() - 1)]).full_tensor()


def copy_to_tp(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns x, which is the same on all ranks; the gradient is the sum of theirs."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    shared = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def reduce_from_tp(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the sum of the ranks' x; the gradient is that of the sum."""
    from torch.distributed.tensor import DTensor, Partial

    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()
