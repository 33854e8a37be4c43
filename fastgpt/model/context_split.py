"""One rank's part of each sequence under context parallelism: positions, targets and attention.

A sequence is cut into twice as many chunks as ranks. Of n ranks, rank i has the chunks i and
2 n - 1 - i: an early one and a late one, because late queries attend to more keys. All but
attention works on a rank's own tokens; for attention, keys and values are gathered from the group,
and their gradients summed.

Source
    Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2: chunks and all-gather.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastgpt.data.items import IGNORED
from fastgpt.ops.protocols import Op


@dataclass(frozen=True, slots=True)
class ContextShard:
    """A rank's part of each sequence of its group."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def positions(self, T: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's tokens, (T / size,) int64, in increasing order."""
        chunks = torch.arange(T, device=device).view(2 * self.size, -1)
        return torch.cat([chunks[i] for i in self._own()])

    def _own(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank

    def targets(self, targets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's targets, and the weight of their mean loss.

        Averaged over the ranks with these weights, the losses are the mean over all targets.

        Args:
            targets: (B, T) of whole sequences.
        """
        local = targets[:, positions]
        count, total = (local != IGNORED).sum(), (targets != IGNORED).sum()
        # a mean over no target would be NaN; its weight is 0
        return local.masked_fill(count == 0, 0), self.size * count / total

    def attend(
        self, attention: Op, q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Computes attention of this rank's queries over keys and values of whole sequences.

        Args:
            q: (B, T / size, H, D); k and v (B, T / size, K, D).
            doc_ids: (B, T) of whole sequences.
        """
        chunk = q.shape[1] // 2
        keys, values = self._gathered(torch.stack((k, v)))
        outs = []
        for i, queries in zip(self._own(), q.split(chunk, dim=1)):
            end = (i + 1) * chunk  # the queries are the last of these
            ids = None if doc_ids is None else doc_ids[:, :end]
            seen = keys[:, :end], values[:, :end]  # views: the backward keeps one copy for both
            outs.append(attention(queries, *seen, doc_ids=ids, **options))
        return torch.cat(outs, dim=1)

    def _gathered(self, x: Tensor) -> Tensor:
        """Joins the ranks' tokens, in the order of the sequence: x (2, B, T / size, K, D)."""
        from torch.distributed import _functional_collectives as collectives

        # renamed in PyTorch 2.13
        gather = getattr(collectives, "all_gather_single_autograd", None)
        gather = gather or collectives.all_gather_tensor_autograd
        parts = gather(x, 0, self.group).view(self.size, *x.shape)
        early, late = parts.chunk(2, dim=3)
        in_order = [*early.unbind(), *reversed(late.unbind())]
        return torch.cat(in_order, dim=2)
