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
from torch.nn.parallel import DistributedDataParallel

from fastgpt.config.config import Config
from fastgpt.convert.source import OpenedModel
from fastgpt.data.items import Data
from fastgpt.data.loader import Loader
from fastgpt.data.order import Mixture
from fastgpt.device import cpu, device
from fastgpt.evaluate.validation import mean_loss, validation_batches
from fastgpt.faults import watchdog
from fastgpt.guards.nonfinite import Finite, check_weights
from fastgpt.guards.spikes import Spikes
from fastgpt.model.gpt import GPT, VOCAB_TABLES
from fastgpt.parallel import fsdp
from fastgpt.parallel.parallelize import build_parallel_model, compile_blocks, replicate
from fastgpt.parallel.signals import StopSignal, SyncedStop
from fastgpt.parallel.stragglers import Stopwatch
from fastgpt.train import micro_batch
from fastgpt.train.optim import Optimizers
from fastgpt.train.plan import Plan, Warn, resolve
from fastgpt.train.resume import position, restore
from fastgpt.train.schedule import lr_ratio


class Engine:
    """Training step of one rank, with its model, optimizers and data; all ranks build it together.

    Raises:
        UserError: the checkpoint to resume does not fit, or memory is too small.
    """

    def __init__(self, plan: Plan, warn: Warn = print) -> None:
        self.plan, self.config, self.world = plan, plan.config, plan.world
        self.device, self.data = plan.device, plan.data
        config, train = self.config, self.config.train
        if self.device == "cpu":
            tokens, dtype = plan.micro_batch * config.model.context, device.DTYPES[plan.precision]
            alone = self.world.size == 1
            cpu.prepare(config.model.dim, tokens, dtype, compiled=plan.compiled, alone=alone)
        if train.tf32:
            torch.set_float32_matmul_precision("high")
        self.model = build_parallel_model(
            config, plan.ops, self.world, self.device,
            narrow_residual=plan.narrow_residual, compiled=plan.compiled,
        )  # fmt: skip
        self.names = [name for name, _ in self.model.named_parameters()]
        self.loss, self.replica = _compiled(plan, self.model)
        scaler = torch.amp.GradScaler(self.device, enabled=plan.precision == "fp16")
        self.optimizers = Optimizers(self.model, config.optim, scaler, self.world, plan.precision)
        self.restored = restore(plan, self.model, self.optimizers, warn)
        self.step, self.lr = self.restored.step, 0.0
        if train.compile == "graphs":
            self.optimizers.keep_gradients()
        self.micro_batch = self._fitting_micro_batch(warn)
        self.loader = Loader(
            [corpus.train for corpus in self.data.corpora],
            Mixture(
                plan.orders, self.data.weights, position(self.restored, self.data, warn)
            ),
            context=config.model.context, global_batch=config.global_batch,
            micro_batch=self.micro_batch, rank=self.world.dp_rank, world_size=self.world.dp_size,
            pad_id=self.data.pad_id, device=self.device,
        )  # fmt: skip
        self.forwards = Stopwatch(self.device)
        self.train_loss = self.grad_norm = torch.zeros((), device=self.device)
        self.finite = Finite(train.skip_nonfinite, self.optimizers.norms)
        self.spikes = None
        if train.spike_z:
            self.spikes = Spikes(train.spike_z, self._weights_and_moments, warn)
            if self.restored.state is not None:
                self.spikes.load(self.step, self.restored.state.get("spikes", {}))

    def _fitting_micro_batch(self, warn: Warn) -> int:
        """Returns the plan's micro-batch, or the largest smaller one that fits into the memory."""
        most, world = self.plan.micro_batch, self.world
        if self.device not in micro_batch.REHEARSED:
            return most
        share = self.config.global_batch // world.dp_size
        with micro_batch.equal_memory(self.device, world, self.config.train.ddp_bucket_mb * 2**20):
            size = micro_batch.fitting(most, share, self._rehearse, world, warn)
        device.reset_peak_memory(self.device)
        return size

    def _rehearse(self, size: int) -> None:
        """Runs two micro-steps of `size` sequences; weights and optimizers stay as they are.

        Gradients of DDP stay on their rank, so that ranks need not run out of memory together.
        Sharded weights sync in the last micro-step, before which they keep whole gradients.
        """
        if self.plan.compiled:  # each size has its own graphs, and 8 of a block are the most
            torch._dynamo.reset_code_caches()
        tokens = torch.zeros(size, self.config.model.context, dtype=torch.int64, device=self.device)
        # AdamW keeps two moments, Muon one; a run that is resumed has loaded them
        loaded = any(optimizer.state for optimizer in self.optimizers.all)
        weights = self.optimizers.parameters
        room = 0 if loaded else sum(8 * fsdp.local_shard(x).numel() for x in weights)
        replicated = self.replica is not None
        unsynced = [replicated or size * self.world.dp_size < self.config.global_batch, replicated]
        micro_steps = [self._no_sync() if x else nullcontext() for x in unsynced]
        loss = self.replica or self.loss
        try:
            micro_batch.rehearse(loss, tokens, self.autocast(), room, micro_steps)
        finally:
            self.optimizers.zero_grad()
            if self.plan.sharded:
                fsdp.forget_iteration(self.model)

    def _no_sync(self) -> AbstractContextManager:
        """Returns a context in which gradients stay on their rank."""
        if self.plan.sharded:
            return fsdp.no_sync(self.model)
        return nullcontext() if self.replica is None else self.replica.no_sync()

    # --- the step ---------------------------------------------------------------------------------

    def train_step(self, stop: StopSignal | None = None) -> None:
        """Takes one optimizer step on the next global batch; sets `train_loss`, `grad_norm`, `lr`.

        Raises:
            Stopped: `stop` was received between two micro-steps; the step is not taken.
        """
        # of dropout, a function of the step, so that no generator state has to be saved;
        # tensor-parallel ranks need the same masks
        numbers = (self.config.seed, self.step, self.world.rank // self.config.parallel.tp)
        seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
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
            # the first step of a run may compile
            watchdog.progress(slow=self.step == self.restored.step)
            # A step's first forward may have a collective of DDP's own: no rank stops before that.
            if stop is not None and (last or micro_step or self.world.size == 1):
                stop.check(self.world, ranks_meet=last or self.plan.has_forward_collectives)
            x, y = self.loader.next()
            with nullcontext() if last else self._no_sync():
                with self.autocast(), timed:
                    # weights the micro-batches by their targets, of which padded samples have
                    # fewer: the sum is the mean over the global batch's targets
                    weight = self.loader.share / micro_steps
                    loss = (self.replica or self.loss)(x, y) * weight
                self.optimizers.scaler.scale(loss).backward()
            total += loss.detach()
        ratio = lr_ratio(self.step, self.config.steps, self.config.optim)
        if self.world.size > 1:
            total = self.world.sum(total / self.world.size)
        self.train_loss = total
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
        report: Callable[[str], None] = lambda _: None,
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
        together, results = self.plan.has_forward_collectives, []
        self.model.eval()
        for corpus in self.data.corpora:
            batches = validation_batches(
                self.config, self.data, corpus, split, max_tokens=max_tokens, step=self.step,
                micro_batch=self.micro_batch, world=self.world,
            )  # fmt: skip
            if together:  # ranks that share weights gather them in each batch
                batches.count = int(self.world.gather(torch.tensor([len(batches)])).max())
            loss = mean_loss(
                self.loss, batches, world=self.world, device=self.device,
                autocast=self.autocast(), stop=self.synced(stop), report=report,
            )  # fmt: skip
            results.append(loss)
        self.model.train()
        return results

    def synced(self, stop: StopSignal | None) -> StopSignal | SyncedStop | None:
        """Returns `stop`; where ranks meet in each forward, one that is the same on all of them."""
        together = self.plan.has_forward_collectives
        return SyncedStop(stop, self.world) if stop is not None and together else stop

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
        weights = {name: fsdp.gathered(x.detach(), x) for name, x in own}
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
    config: Config, warn: Warn = print, data: Data | None = None, source: OpenedModel | None = None
) -> Engine:
    """Builds the engine of a run from its settings: see `resolve` and `Engine`."""
    return Engine(resolve(config, warn, data, source), warn)


def _compiled(
    plan: Plan, model: GPT
) -> tuple[Callable[..., Tensor], DistributedDataParallel | None]:
    """Returns the model as evaluations call it, compiled if the plan says so, and its DDP replica.

    Only several ranks that hold all weights have a replica, of which the blocks are compiled.
    """
    if plan.sharded:
        return model, None
    if plan.world.size == 1:
        if not plan.compiled:
            return model, None
        # training and evaluation batches have one shape, so each compiles a single graph
        options = device.compile_options(plan.device, plan.config.train.compile)
        return torch.compile(model, fullgraph=True, dynamic=False, options=options), None
    if plan.compiled:
        torch._dynamo.config.optimize_ddp = False  # DDP would cut blocks at its buckets
        compile_blocks(model, plan.device)
    return model, replicate(model, plan.config.train)
