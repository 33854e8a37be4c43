"""Loss spikes: a run goes back to an earlier state, and does not read the batches since then again.

Source
    Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", section 5.1: training
    again from before a spike without its batches.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint.checkpoint import Snapshot
from fastgpt.errors import UserError
from fastgpt.ops.dtensor import local

WINDOW, LEAST = 100, 20
"""Number of steps that a step is compared with: at most, and at least."""
EVERY = 25
"""Number of steps between two states that are kept."""
MOST = 3
"""Number of times in a row that a run goes back to the same state."""
NARROWEST = 0.01
"""Least standard deviation, relative to the mean: a loss that hardly varies has no spikes."""


class Spikes:
    """Finds spikes of loss and gradient norm; reads both after each step, which waits for it.

    All ranks decide alike, because loss and norm are of all of them.

    Args:
        z: standard deviations above the mean of the last steps at which a spike begins.
        live: returns weights and optimizer state, as they are.
        warn: called with a line for each spike.
    """

    def __init__(
        self, z: float, live: Callable[[], tuple[Any, Any]], warn: Callable[[str], None]
    ) -> None:
        self._z, self._live, self._warn = z, live, warn
        self._seen: dict[str, deque[float]] = {
            name: deque(maxlen=WINDOW) for name in ("training loss", "gradient norm")
        }
        self._snapshot, self._kept, self._kept_step = Snapshot(), None, 0
        self._in_a_row, self.total = 0, 0
        """`total` is the number of times that the run has gone back."""

    def after_step(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Goes back to the last state that was kept if this step is a spike.

        Raises:
            UserError: that has not helped several times in a row.
        """
        values = torch.stack((loss.float(), norm.float())).tolist()
        found = dict(zip(self._seen, values))
        if not all(map(math.isfinite, values)):  # another part of the trainer deals with these
            return
        high = next((name for name, x in found.items() if x > self._limit(name)), None)
        if high is not None and self._kept is not None:
            self._go_back(step, high, found[high])
            return
        for name, x in found.items():
            self._seen[name].append(x)
        if step % EVERY == 0:
            self.keep(step)

    def _limit(self, name: str) -> float:
        seen = self._seen[name]
        if len(seen) < LEAST:
            return math.inf
        mean = statistics.fmean(seen)
        return mean + self._z * max(statistics.pstdev(seen, mean), NARROWEST * mean)

    def keep(self, step: int) -> None:
        """Keeps the present state in host memory, if there is not one of this step."""
        if self._kept is None or self._kept_step != step:
            self._kept, self._kept_step = self._snapshot.take(self._live()), step
            self._in_a_row = 0

    @torch.no_grad()
    def _go_back(self, step: int, name: str, value: float) -> None:
        self._in_a_row += 1
        self.total += 1
        said = f"step {step}: the {name} is {value:.4g}, over {self._limit(name):.4g}"
        if self._in_a_row > MOST:
            raise UserError(
                f"{said}, for the {MOST + 1}th time since step {self._kept_step}: going back there"
                " does not help (--train.spike-z)"
            )
        for live, saved in zip(tree_leaves(self._live()), tree_leaves(self._kept)):
            if isinstance(live, Tensor):
                local(live).copy_(local(saved))
        self._warn(f"{said}: weights and optimizer go back to those of step {self._kept_step}")

    def state(self) -> dict[str, list[float]]:
        """Returns what earlier steps showed, for checkpoints."""
        return {name: [*seen] for name, seen in self._seen.items()}

    def load(self, step: int, state: dict[str, list[float]]) -> None:
        """Goes on from a checkpoint, whose state is also kept."""
        for name, seen in self._seen.items():
            seen.extend(state.get(name, ()))
        if step:  # before the first one there are no moments
            self.keep(step)
