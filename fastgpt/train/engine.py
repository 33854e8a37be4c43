"""Training step over all ranks: forward, backward and optimizers, evaluation, and its state.

A step does not wait for the device: losses and norms stay there, and only `Engine.finite_loss`
syncs, once per log interval (with fp16, every step).
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastgpt.autotune import choose
from fastgpt.autotune.trials import Sizes
from fastgpt.config.config import Config
from fastgpt.convert.source import OpenedModel, read
from fastgpt.data.items import Data
from fastgpt.data.loader import Loader
from fastgpt.data.order import Mixture
from fastgpt.device import cpu, device
from fastgpt.errors import UserError
from fastgpt.evaluate.validation import mean_loss, validation_batches
from fastgpt.faults import watchdog
from fastgpt.guards.nonfinite import Finite, check_weights
from fastgpt.guards.spikes import Spikes
from fastgpt.model.gpt import VOCAB_TABLES
from fastgpt.ops import tables
from fastgpt.parallel import distributed, fsdp, parallelize
from fastgpt.parallel.signals import StopSignal, SyncedStop
from fastgpt.run.directory import resumes
from fastgpt.run.manifest import precision_asked
from fastgpt.train import init_from, micro_batch
from fastgpt.train.data import check_splits, open_for_run, with_vocabulary
from fastgpt.train.init_from import Warn
from fastgpt.train.optim import Optimizers, lr_ratio
from fastgpt.train.resume import position, restore, with_steps_left


class Engine:
    """Training step of one rank, with its model, optimizers and data; all ranks build it together.

    It decides once what the settings leave open (vocabulary, steps, precision, ops, micro-batch).

    Args:
        data: own datasets, in place of what `config.data` names.
        source: the model that `config.init_from` names, if it is open already.
        rehearse: on one GPU, halve a micro-batch that its memory is too small for.

    Raises:
        UserError: the settings, the data, the model or checkpoint to start from and the device do
            not fit together, or memory is too small.
    """

    def __init__(
        self,
        config: Config,
        warn: Warn = print,
        data: Data | None = None,
        source: OpenedModel | None = None,
        rehearse: bool = True,
    ) -> None:
        self._resolve(config, warn, data, source)
        config, train, world = self.config, self.config.train, self.world
        if self.device == "cpu":
            cpu.prepare(compiled=self.compiled)
        if train.tf32:
            torch.set_float32_matmul_precision("high")
        self.model = parallelize.build_parallel_model(
            config, self.ops, world, self.device,
            narrow_residual=self.narrow_residual, compiled=self.compiled,
        )  # fmt: skip
        self.names = [name for name, _ in self.model.named_parameters()]
        self.loss, self.replica = self._compiled()
        scaler = torch.amp.GradScaler(self.device, enabled=self.precision == "fp16")
        self.optimizers = Optimizers(self.model, config.optim, scaler, world, self.precision)
        if self.source is not None:
            init_from.load_weights(self.source, self.model)
        tokenizer = self.data.tokenizer
        self.restored = restore(config, world, tokenizer, self.model, self.optimizers, warn)
        self.step, self.lr = self.restored.step, 0.0
        self.config = config = with_steps_left(config, self.restored, sum(self.epoch_sizes))
        if (warmup := config.optim.warmup_steps) > config.steps:
            lost = "the learning rate does not reach its peak"
            warn(f"--optim.warmup-steps is {warmup}, but the run has {config.steps} steps: {lost}")
        if train.compile == "graphs":
            self.optimizers.keep_gradients()
        if rehearse and world.size == 1 and self.device in micro_batch.REHEARSED:
            share = config.global_batch
            self.micro_batch = micro_batch.fitting(self.micro_batch, share, self._rehearse, warn)
            device.reset_peak_memory(self.device)
        self.loader = Loader(
            [corpus.train for corpus in self.data.corpora],
            Mixture(
                self.orders, self.data.weights, position(self.restored, self.data, warn)
            ),
            context=config.model.context, global_batch=config.global_batch,
            micro_batch=self.micro_batch, rank=world.dp_rank, world_size=world.dp_size,
            pad_id=self.data.pad_id, device=self.device,
        )  # fmt: skip
        self.train_loss = self.grad_norm = torch.zeros((), device=self.device)
        self.finite = Finite(train.skip_nonfinite, self.optimizers.norms)
        self.spikes = None
        if train.spike_z:
            self.spikes = Spikes(train.spike_z, self._weights_and_moments, warn)
            if self.restored.state is not None:
                self.spikes.load(self.step, self.restored.state.get("spikes", {}))

    def _resolve(
        self, config: Config, warn: Warn, data: Data | None, source: OpenedModel | None
    ) -> None:
        """Opens the data, and decides what the settings leave open; they do not change later.

        A run saves the settings as config.json, and the other decisions in manifest.json.
        """
        self.device = on = device.pick_device(config.train.device)
        world = distributed.start(on)
        together = parallelize.model_parallel_size(config.parallel, world)
        self.world = world = replace(world, model_parallel_size=together)
        self.precision = precision = world.on_rank0(
            lambda: device.pick_precision(precision_asked(config, on, warn), on)
        )
        self.sharded = parallelize.shards_weights(config.parallel, world)
        """True if each rank holds a part of each weight."""
        self.has_forward_collectives = self.sharded or world.model_parallel_size > 1
        """True if ranks exchange tensors in each forward."""
        self.narrow_residual = device.pick_residual(config.train.residual, on, precision)
        if config.ops.attention == "flash_attn" and precision == "fp32":
            raise UserError("--ops.attention is flash_attn: expected --train.precision bf16, fp16")
        choose.require_toolchain(config.ops, on)
        self.compiled, note = device.pick_compile(config.train.compile, on, world.size)
        if note:
            warn(note)
        self.source = None
        """Model that a new run starts from; None: there is none, or a checkpoint is resumed."""
        if config.init_from is not None and not resumes(config.resume):
            self.source = source or read(config.init_from)
            for warning in self.source.warnings:
                warn(warning)
        self.data = open_for_run(config, data, self.source, world, warn)
        if data is not None:  # no text that a later run could find
            own = replace(config.data, source=data.name)
            size = config.model.vocab_size or data.vocab_size
            config = replace(config, data=own, model=replace(config.model, vocab_size=size))
        self.orders = self.data.orders(config.model.context, config.seed)
        """Order of the samples of each corpus."""
        self.epoch_sizes = [order.epoch_size(0) for order in self.orders]
        """Number of samples of each corpus in an epoch."""
        config = with_vocabulary(config, self.data.tokenizer)
        if world.size > 1:
            parallelize.check_combination(config, precision)
        if self.source is not None:
            init_from.check_architecture(config, self.source.config)
        samples, batch = sum(self.epoch_sizes), config.global_batch
        if config.epochs is not None:
            config = replace(config, steps=math.ceil(config.epochs * samples / batch))
        if config.eval_epochs is not None:
            config = replace(config, eval_every=math.ceil(config.eval_epochs * samples / batch))
        self.config = config
        """Settings, of which vocabulary, steps and intervals are numbers now."""
        check_splits(config, self.data, self.orders, warn)
        self.micro_batch = micro_batch.largest_micro_batch(config, world, warn)
        sizes = Sizes(
            config.model, self.micro_batch, precision, self.compiled, self.narrow_residual
        )
        chosen, self.trials = world.on_rank0(
            lambda: choose.choose(config.ops, sizes, on, warn), world.long_timeout_group()
        )
        self.ops = tables.select(chosen, on)

    def _compiled(self) -> tuple[Callable[..., Tensor], DistributedDataParallel | None]:
        """Returns the model as evaluations call it, compiled if asked for, and its DDP replica.

        Only several ranks that hold all weights have a replica, of which the blocks are compiled.
        """
        if self.sharded:
            return self.model, None
        if self.world.size == 1:
            if not self.compiled:
                return self.model, None
            # training and evaluation batches have one shape, so each compiles a single graph
            options = device.compile_options(self.device, self.config.train.compile)
            return torch.compile(self.model, fullgraph=True, dynamic=False, options=options), None
        if self.compiled:
            torch._dynamo.config.optimize_ddp = False  # DDP would cut blocks at its buckets
            parallelize.compile_blocks(self.model, self.device)
        return self.model, parallelize.replicate(self.model, self.config.train)

    def _rehearse(self, size: int) -> None:
        """Runs two micro-steps of `size` sequences; weights and optimizers stay as they are.

        They run beside a buffer as large as the optimizer's state, and the second has the gradients
        of the first in memory, as with accumulation.
        """
        if self.compiled:  # each size has its own graphs, and 8 of a block are the most
            torch._dynamo.reset_code_caches()
        tokens = torch.zeros(size, self.config.model.context, dtype=torch.int64, device=self.device)
        # AdamW keeps two moments, Muon one; a run that is resumed has loaded them
        loaded = any(optimizer.state for optimizer in self.optimizers.all)
        room = 0 if loaded else sum(8 * x.numel() for x in self.optimizers.parameters)
        state = torch.empty(room, dtype=torch.uint8, device=self.device)
        try:
            for _ in range(2):
                with self.autocast():
                    loss = self.loss(tokens, tokens)
                loss.backward()
        finally:
            del state
            self.optimizers.zero_grad()

    def _no_sync(self) -> AbstractContextManager:
        """Returns a context in which gradients stay on their rank."""
        if self.sharded:
            return fsdp.no_sync(self.model)
        return nullcontext() if self.replica is None else self.replica.no_sync()

    # --- the step ---------------------------------------------------------------------------------

    def train_step(self, stop: StopSignal | None = None) -> None:
        """Takes one optimizer step on the next global batch; sets `train_loss`, `grad_norm`, `lr`.

        It raises `Stopped` if `stop` was received between two micro-steps: no step is taken then.
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
        for micro_step in range(micro_steps):
            # Gradients sync in the last micro-step only. DDP decides in its forward, so the forward
            # is inside no_sync: around the backward alone, gradients would silently go unsynced.
            last = micro_step == micro_steps - 1
            # the first step of a run may compile
            watchdog.progress(slow=self.step == self.restored.step)
            # A step's first forward may have a collective of DDP's own: no rank stops before that.
            if stop is not None and (last or micro_step or self.world.size == 1):
                stop.check(self.world, ranks_meet=last or self.has_forward_collectives)
            x, y = self.loader.next()
            with nullcontext() if last else self._no_sync():
                with self.autocast():
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
        return device.autocast(self.device, self.precision)

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
            stop: checked before each batch; if it was received, `Stopped` is raised.
            report: called before each batch with the progress.
        """
        together, results = self.has_forward_collectives, []
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
        together = self.has_forward_collectives
        return SyncedStop(stop, self.world) if stop is not None and together else stop

    @property
    def tokens(self) -> int:
        """Number of tokens that the run has trained on, with padding."""
        steps = self.step - self.restored.step
        return self.restored.tokens + steps * self.config.train.batch_tokens

    def epochs(self) -> list[float]:
        """Returns the number of epochs read so far of each corpus."""
        state = self.loader.state()
        places = zip(state["epoch"], state["index"], self.epoch_sizes)
        return [epoch + index / size for epoch, index, size in places]

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the weights and the state that a checkpoint stores, not copied.

        Of sharded weights they are whole copies in host memory on the main rank, and the other
        ranks have none; it is a collective operation.
        """
        if not self.sharded:
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
            "corpus": self.data.fingerprint,
            "tokens": self.tokens,
            # each step's random numbers are a function of these and of the rank
            "rng": {"seed": self.config.seed, "step": self.step},
        }

    def finite_loss(self) -> tuple[float, float]:
        """Returns the loss and the gradient norm of the last step; syncs with the device.

        With fp16 the norm may be infinite: that step was skipped, and the loss scale was lowered.
        With `train.skip_nonfinite` both may be anything, if that step was skipped. Otherwise, or if
        too many steps were skipped, a `UserError` names the first step and tensor not finite.
        """
        return self.finite.checked(
            self.train_loss, self.grad_norm, self.step, self.optimizers.scaler, self.names
        )

    def check_weights(self) -> None:
        """Raises `UserError` that names the first weight that is not finite, if there is one."""
        check_weights(self.optimizers.parameters, self.names, self.step)
