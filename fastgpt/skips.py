"""Optimizer steps that are left out because loss or gradients are not finite."""

import torch
from torch import Tensor

from fastgpt.errors import counted


class Skips:
    """Decides on each step and counts those left out, on the device: nothing waits for it.

    All ranks decide alike, because loss and norm are those of all of them.

    Args:
        most: number of steps left out in a row that ends a run; 0: none is left out.
    """

    def __init__(self, most: int, device: str) -> None:
        self.most = most
        self.said = f" for {counted(most, 'step')} in a row or longer" if most else ""
        self.total = torch.zeros((), device=device)
        self.in_a_row, self.longest = torch.zeros_like(self.total), torch.zeros_like(self.total)

    def decide(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns 1.0 if the step of this loss and gradient norm is to be left out, else 0.0."""
        left_out = 1 - torch.stack((loss.float(), norm.float())).isfinite().all().float()
        self.total = self.total + left_out
        self.in_a_row = (self.in_a_row + 1) * left_out
        self.longest = torch.maximum(self.longest, self.in_a_row)
        return left_out
