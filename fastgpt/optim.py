"""Optimizers: AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from fastgpt.config import OptimConfig
from fastgpt.distributed import World
from fastgpt.model import GPT
from fastgpt.muon import Muon
from fastgpt.sharding import norms, part, part_like


class Optimizers:
    """Pair of optimizers that step together, each with its own peak learning rate; or AdamW alone.

    Args:
        model: only its parameters with two dimensions have weight decay.
        scaler: enabled for fp16 only.
        world: the ranks, which share out Muon's work.
    """

    def __init__(
        self,
        model: GPT,
        config: OptimConfig,
        scaler: torch.amp.GradScaler,
        world: World = World(),  # noqa: B008
    ) -> None:
        self.config, self.scaler = config, scaler
        self.parameters = list(model.parameters())
        matrices = (
            [p for p in model.h.parameters() if p.dim() == 2] if config.kind == "muon" else []
        )
        taken = {id(p) for p in matrices}
        rest = [p for p in self.parameters if id(p) not in taken]
        adamw = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
                {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.all: list[torch.optim.Optimizer] = [adamw]
        if matrices:
            muon = Muon(
                matrices,
                world,
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                weight_decay=config.weight_decay,
            )
            self.all.append(muon)
        self.norms = torch.zeros(len(self.parameters), device=self.parameters[0].device)
        """Norm of each parameter's gradient at the last step, before clipping."""
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.all]

    def step(self, ratio: float, skip: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Clips, steps at `ratio` of the peak learning rates, and returns the unclipped norm ().

        Args:
            skip: is given that norm, and returns 1.0 to leave weights and moments as they are, else
                0.0, as a tensor () on their device.
        """
        for optimizer, peaks in zip(self.all, self.peaks, strict=True):
            self.scaler.unscale_(optimizer)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * ratio
        gradients = [cast(Tensor, weight.grad) for weight in self.parameters]
        self.norms = norms(gradients)
        norm = self.norms.norm()
        if skip is not None:
            left_out = skip(norm)
            for optimizer in self.all:
                optimizer.found_inf = left_out  # pyright: ignore[reportAttributeAccessIssue]
        if self.config.grad_clip:
            # as nn.utils.clip_grads_with_norm_, for parts
            factor = (self.config.grad_clip / (norm + 1e-6)).clamp(max=1)
            torch._foreach_mul_([part(x) for x in gradients], factor)  # pyright: ignore
        # Only fp16 syncs for the norm: the scaler checks each optimizer's gradients alone, but
        # clipping has spread an infinity of one to the other.
        if not self.scaler.is_enabled() or norm.isfinite():
            for optimizer in self.all:
                self.scaler.step(optimizer)
        self.scaler.update()
        return norm

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.all],
            "scaler": self.scaler.state_dict(),
        }

    def moments(self, state: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields each parameter, and what a state of `state_dict` has for it."""
        for optimizer, saved in zip(self.all, state["optimizers"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            for i, moments in saved["state"].items():
                yield weights[i], moments

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, saved in zip(self.all, state["optimizers"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            for i, moments in saved["state"].items():
                if any(x.dim() and x.shape != weights[i].shape for x in moments.values()):
                    raise ValueError("the optimizer's state has other shapes than the weights")
            parts = {
                i: {
                    name: part_like(x, weights[i]) if x.shape == weights[i].shape else x
                    for name, x in moments.items()
                }
                for i, moments in saved["state"].items()
            }
            optimizer.load_state_dict(saved | {"state": parts})
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
