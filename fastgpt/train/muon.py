"""Muon with matrices of one shape orthogonalised together, shared out among ranks."""
# pyright: reportPrivateImportUsage=false
# (the _foreach_ functions have no other name)

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastgpt.ops.dtensor import is_sharded, local
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import full_tensor, shard_like

MOST = 2**27
"""Number of elements that a rank orthogonalises at once, at most: 0.5 GB in fp32."""
MOST_ON_CPU = 2**19
"""Number of elements that a rank orthogonalises at once on a CPU, at most.

Larger batches leave its caches: at GPT-2 124M a step took 2.7 s with 2^27, and 2.0 s with this.
"""


class Muon(torch.optim.Muon):
    """PyTorch's Muon, with the same equations, settings and state, in fewer and larger operations.

    Each rank orthogonalises its share of the matrices and gets the other updates from the others.

    Args:
        matrices: parameters, each with a gradient at every step that is the same on all ranks.
        world: the ranks.
        settings: those of `torch.optim.Muon`, but for `nesterov` and `adjust_lr_fn`.
    """

    products = torch.bfloat16
    """Dtype of the products; fp32 where a CPU would emulate those in bf16."""

    def __init__(self, matrices: Sequence[Tensor], world: World, **settings: Any) -> None:
        super().__init__(list(matrices), **settings)
        self._world = world
        self.found_inf: Tensor | None = None
        """1.0 if the next step is to change nothing, else 0.0, as in PyTorch's fused AdamW."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates all matrices; a collective operation of all ranks."""
        for group in self.param_groups:
            weights = group["params"]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            for alike in self._batches(weights):
                momenta = [local(self.state[weight]["momentum_buffer"]) for weight in alike]
                grads = [local(grad) for grad in gradients(alike)]
                taken = None if self.found_inf is None else 1 - self.found_inf
                if taken is not None:
                    for momentum, grad in zip(momenta, grads):  # lerp towards itself
                        grad.copy_(torch.where(taken.bool(), grad, momentum))
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                updates = self._updates(alike, group)
                if not updates.is_cpu:  # one launch adds to all where dtypes and strides are equal
                    updates = updates.to(alike[0].dtype, memory_format=torch.contiguous_format)
                rows, columns = alike[0].shape
                lr = group["lr"] * math.sqrt(max(1, rows / columns))
                parts = [local(weight) for weight in alike]
                decay = group["lr"] * group["weight_decay"]
                if taken is not None:
                    updates, decay = updates * taken, decay * taken
                own = [local(shard_like(*pair)) for pair in zip(updates, alike)]
                kept = 1 - decay
                if updates.is_cpu:  # which rounds a number to the weights' bf16, but not a tensor
                    kept = torch.as_tensor(kept, dtype=torch.float64)
                torch._foreach_mul_(parts, kept)
                torch._foreach_add_(parts, own, alpha=-lr)

    def _batches(self, weights: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yields the matrices in groups of one shape, as many as the ranks take at once."""
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in weights:
            shapes.setdefault(weight.shape, []).append(weight)
        for shape, alike in shapes.items():
            most = MOST_ON_CPU if alike[0].is_cpu else MOST
            together = self._world.size * max(1, most // shape.numel())
            for first in range(0, len(alike), together):
                yield alike[first : first + together]

    def _updates(self, alike: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Returns the updates of matrices of one shape: (n or a little more, rows, columns).

        Each rank computes as many; beyond the last matrix, these are the last one again.
        """
        share = -(-len(alike) // self._world.size)
        first = self._world.rank * share
        own = [min(i, len(alike) - 1) for i in range(first, first + share)]
        nesterov = self._nesterov(alike, own, group["momentum"])
        return self._world.gather(
            orthogonalised(nesterov, group["ns_coefficients"], group["ns_steps"], group["eps"])
        )

    def _nesterov(self, alike: list[Tensor], own: list[int], momentum: float) -> Tensor:
        """Returns the whole gradients with momentum of the matrices `own`, to orthogonalise."""
        grads = gradients(alike)
        momenta = [self.state[weight]["momentum_buffer"] for weight in alike]
        if is_sharded(alike[0]):  # all ranks gather each of them, and some keep it
            sums = [g.lerp(m, momentum).to(self.products) for g, m in zip(grads, momenta)]
            wholes = [full_tensor(x, like) for x, like in zip(sums, alike)]
            return torch.stack([wholes[i] for i in own])
        nesterov = grads[0].new_empty((len(own), *grads[0].shape), dtype=self.products)
        sums = torch._foreach_lerp([grads[i] for i in own], [momenta[i] for i in own], momentum)
        torch._foreach_copy_(nesterov.unbind(), sums)
        return nesterov


def gradients(weights: list[Tensor]) -> list[Tensor]:
    return [cast(Tensor, weight.grad) for weight in weights]


def orthogonalised(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Turns the singular values of each matrix of a batch into numbers near 1 (0.5 to 1.5).

    This is the Newton-Schulz iteration of `torch.optim.Muon`. In bf16 its results are the same bit
    for bit where batched products round as single ones do.

    Args:
        x: (n, rows, columns), fp32 or bf16, which is the dtype of the products.
        coefficients: factors of X, (X X^T) X and (X X^T)^2 X.
        steps: number of iterations.
        eps: least norm to divide by.

    Returns:
        Tensor: (n, rows, columns), dtype of `x`.
    """
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    y = x.mT if tall else x
    y = y / torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y
