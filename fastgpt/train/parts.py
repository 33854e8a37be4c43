"""Parts of a run, built from its plan: model, optimizers and loader, restored from a checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Checkpoint
from fastgpt.config.checks import flag
from fastgpt.config.config import Config
from fastgpt.config.saved import changes, saved_config
from fastgpt.data.loader import Loader
from fastgpt.data.tokenizers import Tokenizer, load_tokenizer, same_tokenizer
from fastgpt.device import cpu, device
from fastgpt.errors import UserError, brief
from fastgpt.guards.nonfinite import check_weights
from fastgpt.model.gpt import GPT
from fastgpt.parallel.fsdp import forget_iteration, load_weights, local_shard, no_sync
from fastgpt.parallel.parallelize import build_parallel_model, compile_blocks, replicate
from fastgpt.run.directory import resumes
from fastgpt.train import init_from
from fastgpt.train.micro_batch import REHEARSED, equal_memory, fitting, rehearse
from fastgpt.train.optim import Optimizers
from fastgpt.train.plan import Plan, Warn


@dataclass(slots=True)
class Network:
    """The model of one rank, as training calls it: compiled, and replicated by DDP if need be."""

    model: GPT
    loss: Callable[..., Tensor]
    """The model, compiled as a whole if the plan says so; with several ranks its blocks are."""
    replica: DistributedDataParallel | None
    sharded: bool

    def no_sync(self) -> AbstractContextManager:
        """Returns a context in which gradients stay on their rank."""
        if self.sharded:
            return no_sync(self.model)
        return nullcontext() if self.replica is None else self.replica.no_sync()


@dataclass(slots=True)
class Restored:
    """Progress of a run that is resumed from a checkpoint; that of a new run is empty."""

    step: int = 0
    path: Path | None = None
    """Checkpoint that was resumed; None: there is none."""
    state: dict[str, Any] | None = None
    """State in the checkpoint, without weights and the state of the optimizers."""
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the checkpoint, as `name old -> new`."""


@dataclass(slots=True)
class Parts:
    """Components of a run that were built from its plan: model, optimizers and loader."""

    network: Network
    optimizers: Optimizers
    loader: Loader
    micro_batch: int
    restored: Restored


def build_parts(plan: Plan, warn: Warn = print) -> Parts:
    """Builds the parts of a run; a collective operation of the ranks.

    Args:
        warn: called on the main rank with each warning, one line long.

    Raises:
        UserError: the checkpoint to resume does not fit, or memory is too small.
    """
    warn = warn if plan.world.is_main else lambda _: None
    config = plan.config
    if plan.device == "cpu":
        tokens, dtype = plan.micro_batch * config.model.context, device.DTYPES[plan.precision]
        alone = plan.world.size == 1
        cpu.prepare(config.model.dim, tokens, dtype, compiled=plan.compiled, alone=alone)
    if config.train.tf32:
        torch.set_float32_matmul_precision("high")
    network = _build_network(plan)
    scaler = torch.amp.GradScaler(plan.device, enabled=plan.precision == "fp16")
    optimizers = Optimizers(network.model, config.optim, scaler, plan.world, plan.precision)
    restored = _restore(plan, network.model, optimizers, warn)
    if plan.config.train.compile == "graphs":
        optimizers.keep_gradients()
    micro_batch = _fit_micro_batch(plan, network, optimizers, warn)
    loader = Loader(
        [corpus.train for corpus in plan.data.corpora],
        plan.data.mixture(plan.orders, _position(plan, restored, warn)),
        context=config.model.context,
        global_batch=config.global_batch,
        micro_batch=micro_batch,
        rank=plan.world.dp_rank,
        world_size=plan.world.dp_size,
        pad_id=plan.data.pad_id,
        device=plan.device,
    )
    return Parts(network, optimizers, loader, micro_batch, restored)


def _build_network(plan: Plan) -> Network:
    model = build_parallel_model(
        plan.config, plan.ops, plan.world, plan.device,
        narrow_residual=plan.narrow_residual, compiled=plan.compiled,
    )  # fmt: skip
    loss: Callable[..., Tensor] = model
    alone, replica = plan.world.size == 1, None
    if plan.compiled and alone and not plan.sharded:
        # training and evaluation batches have one shape, so each compiles a single graph
        options = device.compile_options(plan.device, plan.config.train.compile)
        loss = torch.compile(model, fullgraph=True, dynamic=False, options=options)
    if not alone and not plan.sharded:
        if plan.compiled:
            torch._dynamo.config.optimize_ddp = False  # DDP would cut blocks at its buckets
            compile_blocks(model, plan.device)
        replica = replicate(model, plan.config.train)
    return Network(model, loss, replica, plan.sharded)


def _fit_micro_batch(plan: Plan, network: Network, optimizers: Optimizers, warn: Warn) -> int:
    """Returns the plan's micro-batch, or the largest smaller one that fits into the memory."""
    if plan.device not in REHEARSED:
        return plan.micro_batch
    world, share = plan.world, plan.config.global_batch // plan.world.dp_size
    with equal_memory(plan.device, world, plan.config.train.ddp_bucket_mb * 2**20):
        runs = partial(_rehearse, plan, network, optimizers)
        size = fitting(plan.micro_batch, share, runs, world, warn)
    device.kind_of(plan.device).reset_peak_memory()
    return size


def _rehearse(plan: Plan, network: Network, optimizers: Optimizers, size: int) -> None:
    """Runs two micro-steps of `size` sequences; weights and optimizers stay as they are.

    Gradients of DDP stay on their rank, so that ranks need not run out of memory together. Sharded
    weights sync in the last micro-step, before which they keep whole gradients.
    """
    if plan.compiled:  # other sizes have graphs of their own, and 8 of a block are the most
        torch._dynamo.reset_code_caches()
    context, batch = plan.config.model.context, plan.config.global_batch
    tokens = torch.zeros(size, context, dtype=torch.int64, device=plan.device)
    # AdamW keeps two moments, Muon one; a run that is resumed has loaded them
    loaded = any(optimizer.state for optimizer in optimizers.all)
    room = 0 if loaded else sum(8 * local_shard(x).numel() for x in optimizers.parameters)
    replicated = network.replica is not None
    unsynced = [replicated or size * plan.world.dp_size < batch, replicated]
    micro_steps = [network.no_sync() if x else nullcontext() for x in unsynced]
    autocast = device.autocast(plan.device, plan.precision)
    try:
        rehearse(network.replica or network.loss, tokens, autocast, room, micro_steps)
    finally:
        optimizers.zero_grad()
        if plan.sharded:
            forget_iteration(network.model)


# --- a run that goes on ---------------------------------------------------------------------------


def _restore(plan: Plan, model: GPT, optimizers: Optimizers, warn: Warn) -> Restored:
    """Loads the checkpoint that `config.resume` names, or the model to start from, if any."""
    config, source = plan.config, plan.source
    if config.resume is not None and resumes(config.resume):
        return _resume(plan, config.resume, model, optimizers, warn)
    if source is not None:
        init_from.load_weights(source, model)
    return Restored()


def _resume(plan: Plan, resume: str, model: GPT, optimizers: Optimizers, warn: Warn) -> Restored:
    found, complaints = checkpoint.find(resume, world=plan.world)
    for complaint in complaints:
        warn(f"{complaint}; the one before it is used")
    _check_same(found, plan.config, plan.data.tokenizer)
    differing = changes(saved_config(found.path), plan.config)
    try:
        state = dict(load(found, model, optimizers))
        del state["optimizers"]  # a copy of what the optimizers hold now
        _ = state["corpus"], dict(state["loader"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{found.path} does not fit this run: {brief(error)}") from error
    _check_loaded(found, model, optimizers, plan)
    _check_step(plan.config, found.step, found.path)
    return Restored(found.step, found.path, state, tuple(differing))


def load(found: Checkpoint, model: GPT, optimizers: Optimizers) -> dict[str, Any]:
    """Loads weights and optimizers, and returns the state; a collective operation."""
    load_weights(model, found.weights)
    optimizers.load_state_dict(found.state["optimizers"])
    return found.state


def _position(plan: Plan, restored: Restored, warn: Warn) -> dict[str, list[int]] | None:
    """Returns the loader's state in a checkpoint; None: at the beginning of the data."""
    if restored.state is None:
        return None
    corpus = restored.state["corpus"]
    if corpus == plan.data.identity:
        return dict(restored.state["loader"])
    warn(
        f"the data changed since {restored.path} ({str(corpus)[:12]}, now "
        f"{plan.data.identity[:12]}): reading the new data from its beginning"
    )
    return None


def _check_loaded(found: Checkpoint, model: GPT, optimizers: Optimizers, plan: Plan) -> None:
    """Raises `UserError` if a weight or a moment that was loaded is not finite."""
    states = [optimizer.state_dict()["state"] for optimizer in optimizers.all]
    moments = [x for x in tree_leaves(states) if getattr(x, "ndim", 0)]
    names = [name for name, _ in model.named_parameters()]
    names += ["the optimizer's state"] * len(moments)
    try:
        check_weights([*optimizers.parameters, *moments], names, found.step)
    except UserError as error:
        earlier = checkpoint.instead_of(found.path, True, plan.world)
        raise UserError(f"checkpoint {found.path} is damaged: {error}; {earlier}") from error


def _check_same(saved: Checkpoint, config: Config, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if tokenizer, model, optimizer, data order or seed differ from `saved`."""
    kept = load_tokenizer(saved.path / "tokenizer.json")
    if not same_tokenizer(kept, tokenizer):
        raise UserError(
            f"checkpoint {saved.path} and the data have different vocabularies: {kept.kind} with "
            f"{kept.vocab_size} tokens in the checkpoint, {tokenizer.kind} with "
            f"{tokenizer.vocab_size} in the data; with equal numbers, some tokens differ"
        )
    before = saved_config(saved.path)
    fixed = ("optim.kind", "data.val_fraction", "data.sampling", "data.align", "seed")
    for name in (*(f"model.{field}" for field in asdict(config.model)), *fixed):
        old, new = (attrgetter(name)(settings) for settings in (before, config))
        if old != new:
            raise UserError(f"{flag(name)} is {new}: expected {old}, as in checkpoint {saved.path}")


def _check_step(config: Config, step: int, path: Path) -> None:
    """Raises `UserError` if the checkpoint `path`, of `step`, is beyond the run's last step."""
    if step > config.steps:
        asked = "--steps" if config.epochs is None else f"--epochs {config.epochs} in steps"
        raise UserError(f"{asked} is {config.steps}: {path} is already at step {step}")
