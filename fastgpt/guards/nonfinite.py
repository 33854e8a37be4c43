"""Loss, gradients and weights that are not finite: steps are left out, or the run stops."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastgpt.errors import UserError, counted
from fastgpt.ops.dtensor import local
from fastgpt.parallel.fsdp import sum_over_shards


class Finite:
    """Watches loss and gradient norms on the device: nothing waits for it before `checked`.

    All ranks decide alike, because loss and norm are of all of them.

    Args:
        most: number of optimizer steps left out in a row that ends a run; 0: none is left out.
        norms: norms of the gradients before the first step.
        scaler: with fp16 it skips steps itself.
        names: names of the parameters.
    """

    def __init__(
        self, most: int, norms: Tensor, scaler: torch.amp.GradScaler, names: Sequence[str]
    ) -> None:
        self.most, self.skipped, self._scaler, self._names = most, 0, scaler, names
        """`skipped` is the number of steps left out so far, as of the last call of `checked`."""
        self._total = torch.zeros((), device=norms.device)
        self._in_a_row, self._longest = torch.zeros_like(self._total), torch.zeros_like(self._total)
        self._first_norms, self._first_step = norms, torch.zeros_like(self._total)

    def skips(self, loss: Tensor, norm: Tensor) -> Tensor | None:
        """Returns 1.0 if the step of this loss and gradient norm is to be left out, else 0.0.

        It returns None if no step ever is.
        """
        if not self.most:
            return None
        left_out = 1 - torch.stack((loss.float(), norm.float())).isfinite().all().float()
        self._total = self._total + left_out
        self._in_a_row = (self._in_a_row + 1) * left_out
        self._longest = torch.maximum(self._longest, self._in_a_row)
        return left_out

    def watch(self, step: int, norms: Tensor) -> None:
        """Keeps the first step with a gradient that is not finite, and its norms.

        With fp16 a step is skipped now and then: the first one since a finite one is kept.
        """
        fine = self._first_norms.sum() < math.inf  # in two launches, isfinite().all() takes five
        if self._scaler.is_enabled():
            fine |= norms.sum() < math.inf
        if self.most:
            fine |= (norms.sum() < math.inf) & (self._longest < self.most)
        self._first_norms = torch.where(fine, norms, self._first_norms)
        self._first_step = torch.where(fine, step, self._first_step)

    def checked(self, loss: Tensor, norm: Tensor, step: int) -> tuple[float, float]:
        """Returns loss and gradient norm of the last step; syncs with the device.

        If that step was skipped they may be anything; with fp16 only the norm may be.

        Raises:
            UserError: they are not finite, or too many steps were skipped; it names the first step
                and tensor.
        """
        values = torch.stack((loss, norm, self._total, self._longest))
        loss_now, norm_now, self.skipped, longest = values.tolist()
        if longest < self.most:
            return loss_now, norm_now
        norm_is_fine = math.isfinite(norm_now)
        if self._scaler.is_enabled():
            norm_is_fine = self._scaler.get_scale() >= 1
        if not self.most and math.isfinite(loss_now) and norm_is_fine:
            return loss_now, norm_now
        bad = (~self._first_norms.isfinite()).nonzero()
        for_long = f" for {counted(self.most, 'step')} in a row or longer" if self.most else ""
        raise UserError(
            f"step {int(self._first_step)}: not finite{for_long}; at step {step} the training loss"
            f" is {loss_now}, the gradient norm {norm_now}; first tensor that is not finite: "
            + (f"the gradient of {self._names[int(bad[0])]}" if len(bad) else "the loss itself")
        )


def check_weights(named: Iterable[tuple[str, Tensor]], step: int) -> None:
    """Raises `UserError` that names the first weight that is not finite, if there is one."""
    names, weights = zip(*named)
    # a sum reads each weight once; of finite weights it may overflow, so the slower test of
    # single weights has the last word
    bad = [~local(weight.detach()).sum().isfinite() for weight in weights]
    if sum_over_shards(torch.stack(bad).float(), weights[0]).any():
        bad = [~local(weight.detach()).isfinite().all() for weight in weights]
        first = sum_over_shards(torch.stack(bad).float(), weights[0]).nonzero()
        if len(first):
            raise UserError(f"step {step}: first tensor that is not finite: {names[int(first[0])]}")
