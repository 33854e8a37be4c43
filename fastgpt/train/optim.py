"""Optimizers, AdamW or Muon for the blocks' matrices and AdamW for the rest; learning rates."""

import inspect
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fastgpt.config.config import OptimConfig
from fastgpt.model.gpt import GPT
from fastgpt.ops.dtensor import local
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import gathered, norms, shard_like
from fastgpt.train.muon import Muon


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW without the decorators of `step`, which import torch._dynamo (1 s)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Optimizers:
    """Pair of optimizers that step together, each with its own peak learning rate; or AdamW alone.

    Args:
        model: only its parameters with two dimensions have weight decay.
        scaler: enabled for fp16 only.
        world: the ranks, which share out Muon's work.
        precision: of the run; in fp32 on a CPU Muon's products are, too.
    """

    def __init__(
        self,
        model: GPT,
        config: OptimConfig,
        scaler: torch.amp.GradScaler,
        world: World = World(),  # noqa: B008
        precision: str = "bf16",
    ) -> None:
        self.config, self.scaler = config, scaler
        self.named = dict(model.named_parameters())
        self.parameters = list(self.named.values())
        blocks = model.h.parameters() if config.kind == "muon" else ()
        matrices = [p for p in blocks if p.dim() == 2]
        taken = {id(p) for p in matrices}
        rest = [p for p in self.parameters if id(p) not in taken]
        adamw = AdamW(
            [
                {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
                {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8, fused=True,
        )  # fmt: skip
        self.all: list[torch.optim.Optimizer] = [adamw]
        if matrices:
            settings = {"lr": config.muon_lr, "momentum": (1 + config.beta1) / 2}
            muon = Muon(matrices, world, **settings, weight_decay=config.weight_decay)
            if matrices[0].is_cpu and precision == "fp32":
                muon.products = torch.float32
            self.all.append(muon)
        self.norms = torch.zeros(len(self.parameters), device=self.parameters[0].device)
        """Norm of each parameter's gradient at the last step, before clipping."""
        self.norm = self.norms.norm()
        self._kept = False
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.all]

    def set_lr(self, ratio: float) -> None:
        """Sets the learning rates to `ratio` times their peaks."""
        for optimizer, peaks in zip(self.all, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * ratio

    def clip(self) -> Tensor:
        """Clips the gradients, and returns their norm before clipping, ().

        Fused AdamW divides its gradients itself, in `step`.
        """
        for optimizer in self.all:
            self.scaler.unscale_(optimizer)
        gradients = [cast(Tensor, weight.grad) for weight in self.parameters]
        self.norms = norms(gradients)
        self.norm = norm = self.norms.norm()
        if not self.config.grad_clip:
            return norm
        excess = ((norm + 1e-6) / self.config.grad_clip).clamp(min=1)
        # the scaler would have set its own; elsewhere fused AdamW takes no notice
        if not self.scaler.is_enabled() and norm.device.type in ("cpu", "cuda"):
            self.all[0].grad_scale = excess  # pyright: ignore[reportAttributeAccessIssue]
            groups = [group for it in self.all[1:] for group in it.param_groups]
            gradients = [cast(Tensor, x.grad) for group in groups for x in group["params"]]
        if gradients:
            torch._foreach_div_([local(x) for x in gradients], excess)  # pyright: ignore
        return norm

    def step(self, skip: Tensor | None = None) -> None:
        """Updates the weights from the gradients that `clip` has left.

        Args:
            skip: () on their device: 1.0 leaves weights and moments as they are, 0.0 does not.
        """
        if skip is not None:
            for optimizer in self.all:
                optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        # Only fp16 syncs for the norm: the scaler checks each optimizer's gradients alone, but
        # clipping has spread an infinity of one to the other.
        if not self.scaler.is_enabled() or self.norm.isfinite():
            for optimizer in self.all:
                self.scaler.step(optimizer)
        self.scaler.update()

    def weights_and_moments(self) -> tuple[list[Tensor], list[Any]]:
        """Returns the weights and the optimizers' states, as they are."""
        states = [optimizer.state_dict()["state"] for optimizer in self.all]
        return [weight.detach() for weight in self.parameters], states

    def keep_gradients(self) -> None:
        """Gives each gradient memory for good: CUDA graphs cannot add to what one of them made."""
        for weight in self.parameters:
            weight.grad = torch.zeros_like(weight)
        self._kept = True

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=not self._kept)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of both; of sharded weights see `gathered`, a collective operation."""
        states = [optimizer.state_dict() for optimizer in self.all]
        return {
            "optimizers": self._with_moments(gathered, states),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def own(x: Tensor, weight: Tensor) -> Tensor:
            if x.dim() and x.shape != weight.shape:
                raise ValueError("the optimizer's state has other shapes than the weights")
            return shard_like(x, weight) if x.dim() else x

        states = self._with_moments(own, state["optimizers"])
        for optimizer, loaded in zip(self.all, states):
            asked = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            optimizer.load_state_dict(loaded)
            for group, settings in zip(optimizer.param_groups, asked, strict=True):
                group.update(settings)  # flags of a resumed run override the saved settings
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def _with_moments(
        self, change: Callable[[Tensor, Tensor], Tensor], states: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Returns optimizers' states with `change(x, weight)` for each tensor x of a weight."""
        found = []
        for optimizer, saved in zip(self.all, states, strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            moments = {
                i: {name: change(x, weights[i]) for name, x in entries.items()}
                for i, entries in saved["state"].items()
            }
            found.append(saved | {"state": moments})
        return found


def lr_ratio(step: int, steps: int, config: OptimConfig) -> float:
    """Returns the share of the peak learning rate, in [0, 1], for `step` (0-based) of `steps`.

    A linear warmup, then: `cosine` and `linear` fall to `min_lr_ratio` over the rest; `wsd`
    (warmup, stable, decay; Hu et al. 2024, arXiv:2404.06395) holds the peak and falls linearly over
    the last fifth of all steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    low = config.min_lr_ratio
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, steps - round(0.2 * steps))
    left = 1.0 - min(1.0, max(0, step - start) / max(1, steps - start))
    if config.schedule == "cosine":
        return low + (1.0 - low) * 0.5 * (1.0 - math.cos(math.pi * left))
    if config.schedule in ("linear", "wsd"):
        return low + (1.0 - low) * left
    return 1.0
