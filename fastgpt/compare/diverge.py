"""Steps two runs side by side, up to the first tensor in which they differ."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgpt.config.config import Config, ParallelConfig
from fastgpt.errors import UserError
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train


class Side:
    """A run that takes its own steps, whose tensors are seen, and compared with the other's."""

    def __init__(self, config: Config, warn: Callable, bound: float, other: "Side | None") -> None:
        eager = replace(config.train, compile="off")  # compiled modules call no hooks
        self.run = run = build(
            resolve(replace(config, train=eager, parallel=ParallelConfig()), warn)
        )
        self.names: dict[Tensor, str] = {x: name for name, x in run.optimizers.named.items()}
        self.step, self.other, self.bound, self.found = run.step, other, bound, None
        self.tensors, self.calls, self.known = {}, Counter(), {}
        run.model.register_forward_pre_hook(self._begin)
        for name, module in run.model.named_modules():
            if not [*module.children()]:
                module.register_forward_pre_hook(lambda _, x, n=name: self._call(n, "input", x))
                module.register_forward_hook(lambda _, x, y, n=name: self._call(n, "output", y))
        run.model.register_forward_hook(
            lambda *x: self._see("loss", "loss", "", torch.as_tensor(x[-1]))
        )
        for weight in self.names:
            weight.register_post_accumulate_grad_hook(self._backward)
        run.optimizers.all[-1].register_step_post_hook(lambda *_: self.see_state())

    def take_step(self) -> None:
        self.step, self.tensors, self.calls, self.known = self.step + 1, {}, Counter(), {}
        train(self.run, self.run.step + 1)

    def _see(self, kind: str, layer: str, part: str, x: Tensor) -> None:
        self.calls[kind, layer, part] += 1
        if (call := self.calls[kind, layer, part]) > 1:
            part = f"{part} of micro-step {call}".strip()
        if self.other is None:
            self.tensors[kind, layer, part] = x.detach().clone()
        elif self.found is None:
            how = "" if kind == "activation" else "is in B alone"  # other ops call other modules
            if (expected := self.other.tensors.get((kind, layer, part))) is not None:
                how = difference(expected, x.detach(), self.bound)
            new = {"step": self.step, "kind": kind, "layer": layer, "part": part, "how": how}
            self.found = new if how else None

    def see_state(self) -> None:
        """Sees the optimizers' states, then the parameters, which are changed after them."""
        for optimizer in self.run.optimizers.all:
            for weight, state in optimizer.state.items():
                for part, x in state.items():
                    self._see("optimizer state", self.names[weight], part, torch.as_tensor(x))
        for weight, name in self.names.items():
            self._see("parameter", name, "", weight)

    def _begin(self, _: Any, inputs: tuple[Tensor, Tensor]) -> None:
        self.known = {id(x): x for x in inputs}
        for layer, x in zip(("tokens", "targets"), inputs):
            self._see("data", layer, "", x)

    def _backward(self, weight: Tensor) -> None:
        self._see("gradient", self.names[weight], "", torch.as_tensor(weight.grad))

    def _call(self, layer: str, part: str, tensors: Any) -> None:
        for number, x in enumerate(filter(torch.is_tensor, tree_leaves(tensors)), 1):
            # not what a backward computes again, nor what another module has handed on
            if torch._C._current_graph_task_id() == -1 and id(x) not in self.known:
                self.known[id(x)] = x
                self._see("activation", layer, f"{part} {number}".removesuffix(" 1"), x)


def diverge(a: Config, b: Config, steps: int, bound: float, warn: Callable) -> dict | None:
    """Returns the first difference of two runs, or None if there is none in so many steps.

    It has the `step` (at first the checkpoint's), `kind`, `layer`, `part` (input or output of a
    module, name of a moment), and in words `how` the tensors differ. Numbers differ by more than
    `bound`; at 0 it is their bits that do.

    Raises:
        UserError: a run cannot be built, or the batches have other sizes.
    """
    one = Side(a, warn, bound, None)
    two = Side(b, warn, bound, one)
    shapes = [{name: tuple(x.shape) for x, name in side.names.items()} for side in (one, two)]
    for name in shapes[0] | shapes[1]:
        if (x := shapes[0].get(name)) != (y := shapes[1].get(name)):
            how = f"has shape {x} in A, {y} in B"
            return {"step": one.step, "kind": "parameter", "layer": name, "part": "", "how": how}
    sizes = [f"{x.run.loader.accumulation} x {x.run.micro_batch}" for x in (one, two)]
    if sizes[0] != sizes[1]:
        had = f"a step has {sizes[0]} sequences in A, {sizes[1]} in B"
        raise UserError(f"{had}: expected the same --train.batch-tokens and --train.micro-batch")
    one.see_state()
    two.see_state()
    while not two.found and two.step < one.run.plan.resumed.step + steps:
        one.take_step()
        two.take_step()
    for side in (one, two):
        side.run.loader.close()
    return two.found


def difference(a: Tensor, b: Tensor, bound: float) -> str:
    """Says how two tensors differ, in an empty string if they do not; NaN equals NaN."""
    if a.shape != b.shape:
        return f"has shape {tuple(a.shape)} in A, {tuple(b.shape)} in B"
    if a.dtype == b.dtype and torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()):
        return ""
    x, y = a.cpu().double(), b.cpu().double()  # which keeps all bits
    same = (x == y) & ((x.signbit() == y.signbit()) | (bound > 0)) | x.isnan() & y.isnan()
    same |= (x - y).abs() <= (bound or -1)
    if same.all():
        return ""
    distance = torch.where(same, -1.0, (x - y).abs().nan_to_num(math.inf))
    at = torch.unravel_index(distance.argmax(), distance.shape)
    count = f"differs in {int((~same).sum()):,} of {same.numel():,} values, most at"
    return f"{count} {[*map(int, at)]}: {float(x[at])!r} in A, {float(y[at])!r} in B"
