"""Training step over all ranks, with its device, data, model and optimizers.

A step does not wait for the device: losses and norms stay there, and only `Engine.finite_loss`
syncs, once per log interval (with fp16, every step).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastgpt.autotune import choose
from fastgpt.autotune.trials import Sizes
from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.tensors import in_memory
from fastgpt.config import saved
from fastgpt.config.config import Config
from fastgpt.data.corpus import Corpus
from fastgpt.data.items import Data, ItemCorpus
from fastgpt.data.loader import EvalBatches, Loader
from fastgpt.data.order import SampleOrder
from fastgpt.device import device
from fastgpt.errors import UserError, brief
from fastgpt.evaluate.batches import as_many_on_all_ranks, reported, validation_batches
from fastgpt.evaluate.validation import mean_loss
from fastgpt.model.flops import flops_per_token
from fastgpt.model.gpt import VOCAB_TABLES
from fastgpt.ops import tables
from fastgpt.parallel import distributed
from fastgpt.parallel.build import build
from fastgpt.parallel.ddp import replicate
from fastgpt.parallel.fsdp import (
    check_combination,
    forget_iteration,
    load_weights,
    local_shard,
    no_sync,
    unpermuted,
)
from fastgpt.parallel.mesh import model_ranks, non_dp_size, shares_weights
from fastgpt.parallel.signals import StopSignal, SyncedStop
from fastgpt.parallel.stragglers import Stopwatch
from fastgpt.run import directory
from fastgpt.train import init_from
from fastgpt.train.data import check_splits, open_for_run
from fastgpt.train.micro_batch import REHEARSED, equal_memory, fitting, least_bytes, rehearse
from fastgpt.train.nonfinite import Finite, check_weights
from fastgpt.train.optim import Optimizers
from fastgpt.train.schedule import lr_ratio
from fastgpt.train.spikes import Spikes


def _say_nothing(*_: str) -> None:
    """Prints nothing; used on every rank but the main one."""


class Engine:
    """Device, data, model and optimizers of one rank, loaded from a checkpoint to resume a run.

    Args:
        warn: called with each warning, one line long.
        data: own data sets, in place of what `config.data` names.

    Raises:
        UserError: the config, the data and the checkpoint do not fit together.
    """

    def __init__(
        self, config: Config, warn: Callable[[str], None] = print, data: Data | None = None
    ) -> None:
        self.device = device.pick_device(config.train.device)
        if self.device == "cpu":
            device.keep_freed_memory()
        self.world = distributed.start(self.device)
        self.world = replace(self.world, non_dp_size=non_dp_size(config.parallel, self.world))
        self.precision = device.pick_precision(config.train.precision, self.device)
        self.sharded = shares_weights(config.parallel, self.world)
        if self.sharded:
            check_combination(config, self.precision)
        self.compiled, note = device.pick_compile(config.train.compile, self.device)
        choose.require_toolchain(config.ops, self.device)
        self.warn = warn if self.world.is_main else _say_nothing
        if note:
            self.warn(note)
        if config.train.tf32:
            torch.set_float32_matmul_precision("high")
        self.source = init_from.source_of(config, self.warn)
        """Model that a new run starts from; None: there is none, or a checkpoint is resumed."""
        self.data = open_for_run(config, data, self.source, self.world, self.warn)
        if data is not None:  # no text that a later run could find
            own = replace(config.data, source=data.name)
            size = config.model.vocab_size or data.vocab_size
            config = replace(config, data=own, model=replace(config.model, vocab_size=size))
        orders = self.data.orders(config.model.context, config.seed)
        self.epoch_sizes = [order.epoch_size(0) for order in orders]
        self.coverage = [order.coverage() for order in orders]
        config = directory.with_vocabulary(config, self.data.tokenizer)
        if self.source is not None:
            init_from.check_architecture(config, self.source.config)
        self.config = directory.with_epochs(config, sum(self.epoch_sizes))
        self.flops_per_token = flops_per_token(self.config.model)
        share = model_ranks(config.parallel, self.world)
        device.check_free_memory(self.device, least_bytes(self.config) // share)
        self._build_model()
        self.step, self.lr = 0, 0.0
        self.forwards = Stopwatch(self.device)
        self.train_loss = self.grad_norm = torch.zeros((), device=self.device)
        self.finite = Finite(config.train.skip_nonfinite, self.optimizers.norms)
        self.spikes = None
        if config.train.spike_z:
            self.spikes = Spikes(config.train.spike_z, self._weights_and_moments, self.warn)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.resumed_from: Path | None = None
        self.recorded_loss: dict[str, Any] | None = None
        """Record of `integrity.own_loss` in the checkpoint that was resumed, if any."""
        self.doing: Callable[[str, str], None] = _say_nothing
        """Called with each phase of a step, and with its step and micro-step."""
        self.changes: list[str] = []
        """Settings that differ from those of the checkpoint resumed, as `name old -> new`."""
        self._open_loader(orders, self._restore())

    @property
    def has_forward_collectives(self) -> bool:
        """True if ranks meet in each forward."""
        return self.sharded or self.world.non_dp_size > 1

    def _build_model(self) -> None:
        config = self.config
        if config.ops.attention == "flash_attn" and self.precision == "fp32":
            raise UserError("--ops.attention is flash_attn: expected --train.precision bf16, fp16")
        narrow = config.train.residual == "bf16"
        if narrow and self.precision != "bf16":
            expected = "expected --train.precision bf16"
            raise UserError(f"--train.residual is bf16: {expected}, which is {self.precision} here")
        most = max(1, min(config.train.micro_batch, config.global_batch // self.world.dp_size))
        sizes = Sizes(config.model, most, self.precision, self.compiled, narrow)
        asked, self.trials = self.world.on_rank0(
            lambda: choose.choose(config.ops, sizes, self.device, self.warn), patient=True
        )
        selected = tables.select(asked, self.device, compiled=self.compiled)
        self.model = build(config, selected, self.world, self.device, compiled=self.compiled)
        self.ops = self.model.ops
        scaler = torch.amp.GradScaler(self.device, enabled=self.precision == "fp16")
        self.optimizers = Optimizers(self.model, config.optim, scaler, self.world)
        self.loss: Callable[..., Tensor] = self.model
        if self.compiled and not self.sharded:
            torch._dynamo.config.optimize_ddp = False  # DDP would cut the graph at its buckets
            # training and evaluation batches have one shape, so each compiles a single graph
            self.loss = torch.compile(self.model, fullgraph=True, dynamic=False)
        self.replica = None
        if self.world.size > 1 and not self.sharded:
            self.replica = replicate(cast(nn.Module, self.loss), config.train)
        distributed.limit_waits(self.device)

    def _restore(self) -> dict[str, list[int]] | None:
        """Loads the checkpoint that `config.resume` names, or the model to start from, if any.

        Returns:
            dict[str, list[int]] | None: the loader's state; None: at the beginning.
        """
        resume = self.config.resume
        if resume is None or not directory.resumes(resume):
            self._start()
            return None
        found, complaints = checkpoint.find(resume, world=self.world)
        for complaint in complaints:
            self.warn(f"{complaint}; the one before it is used")
        directory.check_same(found, self.config, self.data.tokenizer)
        self.resumed_from = found.path
        self.changes = saved.changes(saved.saved_config(found.path), self.config)
        try:
            state = self.load(found)
            corpus, loader = state["corpus"], dict(state["loader"])
            self.recorded_loss = state.get("own_loss")
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UserError(f"{found.path} does not fit this run: {brief(error)}") from error
        self.step = found.step
        self._check_loaded(found.path)
        directory.check_step(self.config, self.step, found.path)
        if corpus != self.data.identity:
            self.warn(
                f"the data changed since {found.path} ({str(corpus)[:12]}, now "
                f"{self.data.identity[:12]}): reading the new data from its beginning"
            )
            return None
        return loader

    def _check_loaded(self, path: Path) -> None:
        """Raises `UserError` if a weight or a moment loaded from `path` is not finite."""
        moments = [x for x in tree_leaves(self._weights_and_moments()[1]) if getattr(x, "ndim", 0)]
        names = [*self.names, *["the optimizer's state"] * len(moments)]
        try:
            check_weights([*self.optimizers.parameters, *moments], names, self.step)
        except UserError as error:
            earlier = checkpoint.instead_of(path, True, self.world)
            raise UserError(f"checkpoint {path} is damaged: {error}; {earlier}") from error

    def load(self, found: checkpoint.Checkpoint) -> dict[str, Any]:
        """Loads weights and optimizers, and returns the state; a collective operation."""
        state = found.state
        if found.shards is not None:
            state = found.shards.restore(state, self.model, self.optimizers.all)
        else:
            load_weights(self.model, found.weights)
        self.optimizers.load_state_dict(state["optimizers"])
        if self.spikes is not None:
            self.spikes.load(found.step, state.get("spikes", {}))
        return state

    def _start(self) -> None:
        """Loads the model that `config.init_from` names, if any, and with `take_over` its step."""
        if self.source is None:
            return
        init_from.load_weights(self.source, self.model)
        if self.config.take_over:
            source, adamw = self.source, self.optimizers.all[0]
            self.step = init_from.take_over(source, self.config, self.model, adamw, self.warn)
            directory.check_step(self.config, self.step, source.path)
        self.source = replace(self.source, weights=in_memory({}))  # they are in the model now

    def _open_loader(self, orders: list[SampleOrder], state: dict[str, list[int]] | None) -> None:
        config, ranks = self.config, self.world.dp_size
        if config.global_batch % ranks:
            of = (
                f" that read data, {self.world.non_dp_size} together"
                if self.world.non_dp_size > 1
                else ""
            )
            raise UserError(
                f"--train.batch-tokens is {config.train.batch_tokens}: {config.global_batch} "
                f"sequences of {config.model.context}, expected a multiple of the {ranks} ranks{of}"
            )
        share = config.global_batch // ranks
        most = min(share, config.train.micro_batch)
        self.micro_batch = next(size for size in range(most, 0, -1) if share % size == 0)
        if 2 * self.micro_batch <= most:
            self.warn(
                f"{share} sequences per rank divide into micro-batches of {self.micro_batch} at "
                f"most (--train.micro-batch is {config.train.micro_batch}): another "
                "--train.batch-tokens would be faster"
            )
        if self.device in REHEARSED:
            with equal_memory(self.device, self.world, config.train.ddp_bucket_mb * 2**20):
                self.micro_batch = fitting(
                    self.micro_batch, share, self._rehearse, self.world, self.warn
                )
            device.kind_of(self.device).reset_peak_memory()
        check_splits(config, self.data, self.coverage, self.warn)
        self.loader = Loader(
            [corpus.train for corpus in self.data.corpora],
            self.data.mixture(orders, state),
            context=config.model.context,
            global_batch=config.global_batch,
            micro_batch=self.micro_batch,
            rank=self.world.dp_rank,
            world_size=ranks,
            pad_id=self.data.pad_id,
            device=self.device,
        )

    def _rehearse(self, size: int) -> None:
        """Runs two micro-steps of `size` sequences; weights and optimizers stay as they are.

        Gradients of DDP stay on their rank, so that ranks need not run out of memory together.
        Shared weights sync in the last micro-step, before which they keep whole gradients.
        """
        if self.compiled:  # other sizes have graphs of their own, and 8 of a block are the most
            torch._dynamo.reset_code_caches()
        tokens = torch.zeros(size, self.config.model.context, dtype=torch.int64, device=self.device)
        # AdamW keeps two moments, Muon one; a run that is resumed has loaded them
        loaded = any(optimizer.state for optimizer in self.optimizers.all)
        room = 0 if loaded else sum(8 * local_shard(x).numel() for x in self.optimizers.parameters)
        accumulates = size * self.world.dp_size < self.config.global_batch
        quiet = [self.replica is not None or accumulates, self.replica is not None]
        micro_steps = [self._no_sync() if x else nullcontext() for x in quiet]
        try:
            rehearse(self.replica or self.loss, tokens, self.autocast(), room, micro_steps)
        finally:
            self.optimizers.zero_grad()
            if self.sharded:
                forget_iteration(self.model)

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
                stop.check(self.world, ranks_meet=last or self.has_forward_collectives)
            self.doing("reading a batch", at)
            x, y = self.loader.next()
            self.doing("forward and backward", at)
            with nullcontext() if last else self._no_sync():
                with self.autocast(), timed:
                    # weights the micro-batches by their targets, of which padded samples have
                    # fewer: the sum is the mean over the global batch's targets
                    part = self.loader.share / micro_steps
                    loss = (self.replica or self.loss)(x, y) * part
                self.optimizers.scaler.scale(loss).backward()
            total += loss.detach()
        self.doing("optimizer step", f"step {self.step + 1}")
        ratio = lr_ratio(self.step, self.config.steps, self.config.optim)
        self.train_loss = self.world.average(total)
        skip = partial(self.finite.skips, self.train_loss) if self.finite.most else None
        self.grad_norm = self.optimizers.step(ratio, skip)
        scaled = self.optimizers.scaler.is_enabled()
        self.finite.watch(self.step + 1, self.optimizers.norms, scaled=scaled)
        self.lr = self.config.optim.lr * ratio
        self.step += 1
        if self.spikes is not None:
            self.spikes.after_step(self.step, self.train_loss, self.grad_norm)

    def _no_sync(self) -> AbstractContextManager:
        """Returns a context in which gradients stay on their rank."""
        if self.sharded:
            return no_sync(self.model)
        return nullcontext() if self.replica is None else self.replica.no_sync()

    def autocast(self) -> AbstractContextManager:
        """Returns the autocast context of every forward pass."""
        return device.autocast(self.device, self.precision)

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
                if stop is not None and self.has_forward_collectives
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
        return (
            as_many_on_all_ranks(mine, self.world, shape) if self.has_forward_collectives else mine
        )

    def epochs(self) -> list[float]:
        """Returns the number of epochs read so far of each corpus."""
        state = self.loader.state()
        places = zip(state["epoch"], state["index"], self.epoch_sizes)
        return [epoch + index / size for epoch, index, size in places]

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the weights and the state that a checkpoint stores; of shared ones the parts.

        With tensor parallelism it is a collective operation.
        """
        if not self.sharded:
            return self.model.state_dict(), self.state()
        # not the model's own: FSDP puts whole weights in their place between two forwards
        own = zip(self.names, self.optimizers.parameters)
        weights = {name: unpermuted(x.detach(), x) for name, x in own}
        rows = dict.fromkeys(weights.keys() & set(VOCAB_TABLES), self.config.model.vocab_size)
        return weights, self.state() | {"rows": rows}

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


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Returns the random seed of one step's dropout, so that no generator state has to be saved.

    Args:
        rank: the same for tensor-parallel ranks, which need the same masks.
    """
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
