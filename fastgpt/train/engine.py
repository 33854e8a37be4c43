"""Training step over all ranks: forward, backward and optimizers, evaluation, and its state.

A step does not wait for the device: losses and norms stay there, and only `Engine.finite_loss`
syncs, once per log interval (with fp16, every step).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgpt.config.config import Config
from fastgpt.convert.source import OpenedModel
from fastgpt.data.corpus import Corpus
from fastgpt.data.items import Data, ItemCorpus
from fastgpt.data.loader import EvalBatches
from fastgpt.device import device
from fastgpt.evaluate.batches import as_many_on_all_ranks, reported, validation_batches
from fastgpt.evaluate.validation import mean_loss
from fastgpt.guards.nonfinite import Finite, check_weights
from fastgpt.guards.spikes import Spikes
from fastgpt.model.flops import flops_per_token
from fastgpt.model.gpt import VOCAB_TABLES
from fastgpt.parallel.fsdp import gathered
from fastgpt.parallel.signals import StopSignal, SyncedStop
from fastgpt.parallel.stragglers import Stopwatch
from fastgpt.train.parts import Parts, build_parts
from fastgpt.train.plan import Plan, resolve
from fastgpt.train.schedule import lr_ratio


def _say_nothing(*_: str) -> None:
    """Prints nothing; used on every rank but the main one."""


class Engine:
    """Training step of one rank, with the parts of its run.

    Args:
        warn: called on the main rank with each warning, one line long.
    """

    def __init__(self, plan: Plan, parts: Parts, warn: Callable[[str], None] = print) -> None:
        self.plan, self.restored = plan, parts.restored
        self.config, self.world, self.device, self.data = (
            plan.config, plan.world, plan.device, plan.data,
        )  # fmt: skip
        self.network, self.model, self.loss = parts.network, parts.network.model, parts.network.loss
        self.optimizers, self.loader = parts.optimizers, parts.loader
        self.micro_batch = parts.micro_batch
        self.step, self.lr = parts.restored.step, 0.0
        self.names = [name for name, _ in self.model.named_parameters()]
        self.flops_per_token = flops_per_token(self.config.model)
        self.forwards = Stopwatch(self.device)
        self.train_loss = self.grad_norm = torch.zeros((), device=self.device)
        train = self.config.train
        self.finite = Finite(train.skip_nonfinite, self.optimizers.norms)
        self.spikes = None
        if train.spike_z:
            said = warn if self.world.is_main else _say_nothing
            self.spikes = Spikes(train.spike_z, self._weights_and_moments, said)
            if self.restored.state is not None:
                self.spikes.load(self.step, self.restored.state.get("spikes", {}))
        self.doing: Callable[[str, str], None] = _say_nothing
        """Called with each phase of a step, and with its step and micro-step."""

    # --- the step ---------------------------------------------------------------------------------

    def train_step(self, stop: StopSignal | None = None) -> None:
        """Takes one optimizer step on the next global batch; sets `train_loss`, `grad_norm`, `lr`.

        Raises:
            Stopped: `stop` was received between two micro-steps; the step is not taken.
        """
        seed = _dropout_seed(
            self.config.seed, self.step, self.world.rank // self.config.parallel.tp
        )
        # torch.manual_seed formats a stack trace for each missing GPU backend, which takes a good
        # part of the smallest steps
        (torch.default_generator if self.device == "cpu" else torch).manual_seed(seed)
        self.optimizers.zero_grad()
        micro_steps = self.loader.accumulation
        total = torch.zeros((), device=self.device)
        timed = self.forwards if self.world.size > 1 else nullcontext()
        for micro_step in range(micro_steps):
            # Gradients sync in the last micro-step only. DDP decides in its forward, so the forward
            # is inside no_sync: around the backward alone, gradients would silently go unsynced.
            last = micro_step == micro_steps - 1
            at = f"step {self.step + 1}, micro-step {micro_step + 1} of {micro_steps}"
            # A step's first forward may have a collective of DDP's own: no rank stops before that.
            if stop is not None and (last or micro_step or self.world.size == 1):
                self.doing("agreeing with the other ranks to go on", at)
                stop.check(self.world, ranks_meet=last or self.plan.has_forward_collectives)
            self.doing("reading a batch", at)
            x, y = self.loader.next()
            self.doing("forward and backward", at)
            with nullcontext() if last else self.network.no_sync():
                with self.autocast(), timed:
                    # weights the micro-batches by their targets, of which padded samples have
                    # fewer: the sum is the mean over the global batch's targets
                    weight = self.loader.share / micro_steps
                    loss = (self.network.replica or self.loss)(x, y) * weight
                self.optimizers.scaler.scale(loss).backward()
            total += loss.detach()
        self.doing("optimizer step", f"step {self.step + 1}")
        ratio = lr_ratio(self.step, self.config.steps, self.config.optim)
        self.train_loss = self.world.sum(total / self.world.size)
        skip = partial(self.finite.skips, self.train_loss) if self.finite.most else None
        self.grad_norm = self.optimizers.step(ratio, skip)
        scaled = self.optimizers.scaler.is_enabled()
        self.finite.watch(self.step + 1, self.optimizers.norms, scaled=scaled)
        self.lr = self.config.optim.lr * ratio
        self.step += 1
        if self.spikes is not None:
            self.spikes.after_step(self.step, self.train_loss, self.grad_norm)

    def autocast(self) -> AbstractContextManager:
        """Returns the autocast context of every forward pass."""
        return device.autocast(self.device, self.plan.precision)

    def evaluate(
        self,
        split: str,
        max_tokens: int = 0,
        stop: StopSignal | None = None,
        report: Callable[[str], None] = _say_nothing,
    ) -> list[tuple[float, int]]:
        """Computes the mean loss in nats for each corpus, and the number of targets scored.

        Args:
            split: `val`; or `train` if `data.eval_batches` is set, which replaces `max_tokens`.
            max_tokens: approximate number of targets to score in fixed windows; 0: all.
            stop: checked before each batch.
            report: called before each batch with the progress.

        Raises:
            Stopped: `stop` was received.
        """
        self.model.eval()
        results = [
            mean_loss(
                self.loss,
                reported(self._eval_batches(corpus, split, max_tokens), report),
                world=self.world,
                device=self.device,
                autocast=self.autocast(),
                stop=SyncedStop(stop, self.world)
                if stop is not None and self.plan.has_forward_collectives
                else stop,
            )
            for corpus in self.data.corpora
        ]
        self.model.train()
        return results

    def _eval_batches(
        self, corpus: Corpus | ItemCorpus, split: str, max_tokens: int
    ) -> EvalBatches:
        mine = validation_batches(
            self.config, self.data, corpus, split,
            max_tokens=max_tokens, step=self.step, micro_batch=self.micro_batch, world=self.world,
        )  # fmt: skip
        shape = (self.micro_batch, self.config.model.context)
        together = self.plan.has_forward_collectives
        return as_many_on_all_ranks(mine, self.world, shape) if together else mine

    def epochs(self) -> list[float]:
        """Returns the number of epochs read so far of each corpus."""
        state = self.loader.state()
        places = zip(state["epoch"], state["index"], self.plan.epoch_sizes)
        return [epoch + index / size for epoch, index, size in places]

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the weights and the state that a checkpoint stores, not copied.

        Of sharded weights they are whole copies in host memory on the main rank, and the other
        ranks have none; it is a collective operation.
        """
        if not self.plan.sharded:
            return self.model.state_dict(), self.state()
        # not the model's own: FSDP puts whole weights in their place between two forwards
        own = zip(self.names, self.optimizers.parameters)
        weights = {name: gathered(x.detach(), x) for name, x in own}
        for name in weights.keys() & set(VOCAB_TABLES):
            weights[name] = weights[name][: self.config.model.vocab_size]
        return weights, self.state()

    def _weights_and_moments(self) -> tuple[Any, Any]:
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers.all]
        return [x.detach() for x in self.model.parameters()], states

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores besides the weights."""
        spikes = {} if self.spikes is None else {"spikes": self.spikes.state()}
        return spikes | {
            "optimizers": self.optimizers.state_dict(),
            "loader": self.loader.state(),
            "corpus": self.data.identity,
            # each step's random numbers are a function of these and of the rank
            "rng": {"seed": self.config.seed, "step": self.step},
        }

    # --- is everything finite? --------------------------------------------------------------------

    def finite_loss(self) -> tuple[float, float]:
        """Returns the loss and the gradient norm of the last step; syncs with the device.

        With fp16 the norm may be infinite: that step was skipped, and the loss scale was lowered.
        With `train.skip_nonfinite` both may be anything, if that step was skipped.

        Raises:
            UserError: one of them is not finite, or too many steps in a row were skipped; the
                message names the first such step and tensor.
        """
        return self.finite.checked(
            self.train_loss, self.grad_norm, self.step, self.optimizers.scaler, self.names
        )

    def check_weights(self) -> None:
        """Raises `UserError` that names the first weight that is not finite, if there is one."""
        check_weights(self.optimizers.parameters, self.names, self.step)


def build_engine(
    config: Config,
    warn: Callable[[str], None] = print,
    data: Data | None = None,
    source: OpenedModel | None = None,
) -> Engine:
    """Builds the engine of a run from its settings: `resolve`, then `build_parts`.

    Args:
        warn: called on the main rank with each warning, one line long.
        data: own data sets, in place of what `config.data` names.
        source: the model that `config.init_from` names, if it is open already.

    Raises:
        UserError: the settings, the data, the device and the checkpoint do not fit together.
    """
    plan = resolve(config, warn, data, source)
    return Engine(plan, build_parts(plan, warn), warn)


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Returns the random seed of one step's dropout, so that no generator state has to be saved.

    Args:
        rank: the same for tensor-parallel ranks, which need the same masks.
    """
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
