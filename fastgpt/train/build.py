"""The parts of a run on one rank, built from its plan: model, optimizers, loader and guards."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Checkpoint
from fastgpt.data.loader import Loader
from fastgpt.data.order import Mixture
from fastgpt.device import cpu, device
from fastgpt.errors import UserError, brief
from fastgpt.evaluate.validation import mean_loss, validation_batches
from fastgpt.guards.nonfinite import Finite, check_weights
from fastgpt.guards.spikes import Spikes
from fastgpt.model.gpt import GPT, VOCAB_TABLES
from fastgpt.parallel import fsdp, parallelize
from fastgpt.parallel.distributed import World
from fastgpt.parallel.signals import StopSignal
from fastgpt.train import init_from
from fastgpt.train.init_from import Warn
from fastgpt.train.optim import Optimizers
from fastgpt.train.plan import Plan

PROBED = {"cuda"}
"""Types of device with memory of their own, which a step may use up."""


def build(plan: Plan, warn: Warn = print, probe: bool = True) -> "Run":
    """Builds what a run needs to take steps; a collective operation.

    A plan that resumes a run is built once: the optimizers take the state out of its checkpoint.

    Args:
        probe: on one GPU, halve a micro-batch that its memory is too small for.

    Raises:
        UserError: the weights or the checkpoint do not fit, or memory is too small.
    """
    config, world, on = plan.config, plan.world, plan.device
    if on == "cpu":
        cpu.prepare(compiled=plan.compiled)
    model = parallelize.build_parallel_model(
        config, plan.ops, world, on,
        residual_dtype=plan.residual_dtype, compiled=plan.compiled,
    )  # fmt: skip
    forward, ddp = _compiled(plan, model)
    scaler = torch.amp.GradScaler(on, enabled=plan.precision == "fp16")
    optimizers = Optimizers(model, config.optim, scaler, world, plan.precision)
    if plan.source is not None:
        init_from.load_weights(plan.source, model)
    if plan.resumed.checkpoint is not None:
        restore(plan.resumed.checkpoint, model, optimizers, world)
    if config.train.compile == "graphs":
        optimizers.keep_gradients()
    micro_batch = plan.micro_batch
    if probe and world.size == 1 and on in PROBED:
        micro_batch = probe_micro_batch(plan, forward, optimizers, warn)
        device.reset_peak_memory(on)
    loader = Loader(
        [corpus.train for corpus in plan.data.corpora],
        Mixture(plan.orders, plan.data.weights, plan.resumed.position),
        context=config.model.context, global_batch=config.global_batch, micro_batch=micro_batch,
        rank=world.dp_rank, world_size=world.dp_size, pad_id=plan.data.pad_id, device=on,
    )  # fmt: skip
    spikes = None
    if config.train.spike_z:
        spikes = Spikes(config.train.spike_z, optimizers.weights_and_moments, warn)
        if plan.resumed.checkpoint is not None:
            spikes.load(plan.resumed.step, plan.resumed.checkpoint.state.get("spikes", {}))
    finite = Finite(config.train.skip_nonfinite, optimizers.norms, scaler, [*optimizers.named])
    return Run(
        plan=plan, model=model, forward=forward, ddp=ddp, optimizers=optimizers, loader=loader,
        micro_batch=micro_batch, step=plan.resumed.step, loss=torch.zeros((), device=on),
        grad_norm=torch.zeros((), device=on),
        finite=finite, spikes=spikes,
    )  # fmt: skip


@dataclass(kw_only=True)
class Run:
    """A run on one rank: its parts, and how far it has come."""

    plan: Plan
    model: GPT
    forward: Callable[..., Tensor]
    """The model, compiled if the plan says so."""
    ddp: DistributedDataParallel | None
    """Calls the model in training where several ranks hold all weights."""
    optimizers: Optimizers
    loader: Loader
    micro_batch: int
    step: int
    loss: Tensor
    """Training loss of the last step, (), on the device: to read it waits."""
    grad_norm: Tensor
    """Norm of that step's gradient before clipping, ()."""
    finite: Finite
    spikes: Spikes | None
    stop: StopSignal | None = None
    """Asked between micro-steps and between batches of an evaluation."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the run has trained on, with padding."""
        resumed, per_step = self.plan.resumed, self.plan.config.train.batch_tokens
        return resumed.tokens + (self.step - resumed.step) * per_step

    def epochs(self) -> list[float]:
        """Returns the number of epochs read so far of each corpus."""
        state = self.loader.state()
        places = zip(state["epoch"], state["index"], self.plan.epoch_sizes)
        return [epoch + index / size for epoch, index, size in places]

    def autocast(self) -> AbstractContextManager:
        """Returns the autocast context of every forward pass."""
        return device.autocast(self.plan.device, self.plan.precision)

    def no_sync(self) -> AbstractContextManager:
        """Returns a context in which gradients stay on their rank."""
        if self.plan.sharded:
            return fsdp.no_sync(self.model)
        return nullcontext() if self.ddp is None else self.ddp.no_sync()

    def evaluate(
        self,
        split: str,
        max_tokens: int = 0,
        report: Callable[[str], None] = lambda _: None,
    ) -> list[tuple[float, int]]:
        """Computes the mean loss in nats for each corpus, and the number of targets scored.

        Args:
            split: `val`; or `train` if `data.sampling` is `lecture`, which draws the tokens of both
                at random.
            max_tokens: approximate number of targets to score in fixed windows; 0: all.
            report: called before each batch with the progress.

        Raises:
            Stopped: `stop` was received.
        """
        plan, results = self.plan, []
        self.model.eval()
        for corpus in plan.data.corpora:
            batches = validation_batches(
                plan.config, plan.data, corpus, split, max_tokens=max_tokens, step=self.step,
                micro_batch=self.micro_batch, world=plan.world,
            )  # fmt: skip
            if plan.has_forward_collectives:  # ranks that share weights gather them in each batch
                batches.count = int(plan.world.gather(torch.tensor([len(batches)])).max())
            loss = mean_loss(
                self.forward, batches, world=plan.world, device=plan.device,
                autocast=self.autocast(), stop=self.stop, all_reduce=plan.has_forward_collectives,
                report=report,
            )  # fmt: skip
            results.append(loss)
        self.model.train()
        return results

    def finite_loss(self) -> tuple[float, float]:
        """Returns loss and gradient norm of the last step, as `Finite.checked`; syncs."""
        return self.finite.checked(self.loss, self.grad_norm, self.step)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the weights and the state that a checkpoint stores, not copied.

        Sharded weights are whole copies in host memory on the main rank, and the other ranks have
        none; it is a collective operation.
        """
        state = {
            "optimizers": self.optimizers.state_dict(),
            "loader": self.loader.state(),
            "corpus": self.plan.data.fingerprint,
            "tokens": self.tokens,
            # each step's random numbers are a function of these and of the rank
            "rng": {"seed": self.plan.config.seed, "step": self.step},
        }
        if self.spikes is not None:
            state["spikes"] = self.spikes.state()
        if not self.plan.sharded:
            return self.model.state_dict(), state
        # not the model's own: FSDP puts whole weights in their place between two forwards
        own = self.optimizers.named
        weights = {name: fsdp.gathered(x.detach(), x) for name, x in own.items()}
        for name in weights.keys() & set(VOCAB_TABLES):
            weights[name] = weights[name][: self.plan.config.model.vocab_size]
        return weights, state


def _compiled(
    plan: Plan, model: GPT
) -> tuple[Callable[..., Tensor], DistributedDataParallel | None]:
    """Returns the model, compiled if the plan says so, and where ranks hold whole weights DDP's.

    With several ranks the blocks are compiled, one by one.
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
        parallelize.compile_blocks(model, plan.device)
    return model, parallelize.replicate(model, plan.config.parallel)


def restore(found: Checkpoint, model: GPT, optimizers: Optimizers, world: World) -> None:
    """Loads weights and optimizers from a checkpoint; a collective operation.

    Raises:
        UserError: they do not fit, or a weight or a moment is not finite.
    """
    try:
        fsdp.load_weights(model, found.weights)
        # removed from the state: the optimizers have a copy
        optimizers.load_state_dict(found.state.pop("optimizers"))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{found.path} does not fit this run: {brief(error)}") from error
    states = [optimizer.state_dict()["state"] for optimizer in optimizers.all]
    moments = [x for x in tree_leaves(states) if getattr(x, "ndim", 0)]
    named = [*optimizers.named.items(), *(("the optimizer's state", x) for x in moments)]
    try:
        check_weights(named, found.step)
    except UserError as error:
        earlier = checkpoint.previous_valid(found.path, True, world)
        raise UserError(f"checkpoint {found.path} is damaged: {error}; {earlier}") from error


def probe_micro_batch(
    plan: Plan, forward: Callable[..., Tensor], optimizers: Optimizers, warn: Warn
) -> int:
    """Returns the plan's micro-batch, halved until two micro-steps fit into the GPU's memory.

    Raises:
        UserError: not even one sequence does.
    """
    size, batch = plan.micro_batch, plan.config.global_batch
    while True:
        with suppress(torch.OutOfMemoryError):
            try_micro_steps(plan, forward, optimizers, size)
            break
        gc.collect()  # no longer in the handler, where the error holds the tensors of its frames
        torch.cuda.empty_cache()
        if size == 1:
            raise UserError(
                "no GPU memory left for a step with a micro-batch of 1: end other programs on the"
                " GPU (nvidia-smi shows them), or train a smaller model or with a smaller"
                " --model.context"
            )
        size = next(n for n in range(size // 2, 0, -1) if batch % n == 0)
    if size != plan.micro_batch:
        warn(
            f"--train.micro-batch is {plan.micro_batch}, for which the GPU's memory is too small:"
            f" using {size}, {batch // size} at a time for the same batch (gradient accumulation)"
        )
    return size


def try_micro_steps(
    plan: Plan, forward: Callable[..., Tensor], optimizers: Optimizers, size: int
) -> None:
    """Runs two micro-steps of `size` sequences; weights and optimizers stay as they are.

    They run beside a buffer as large as the optimizer's state, and the second has the gradients of
    the first in memory, as with accumulation.
    """
    if plan.compiled:  # each size has its own graphs, and 8 of a block are the most
        torch._dynamo.reset_code_caches()
    shape = size, plan.config.model.context
    tokens = torch.zeros(shape, dtype=torch.int64, device=plan.device)
    # AdamW keeps two moments, Muon one; a run that is resumed has loaded them
    loaded = any(optimizer.state for optimizer in optimizers.all)
    room = 0 if loaded else sum(8 * x.numel() for x in optimizers.parameters)
    state = torch.empty(room, dtype=torch.uint8, device=plan.device)
    try:
        for _ in range(2):
            with device.autocast(plan.device, plan.precision):
                loss = forward(tokens, tokens)
            loss.backward()
    finally:
        del state
        optimizers.zero_grad()
