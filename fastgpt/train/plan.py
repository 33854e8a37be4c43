"""Plan of a run: all that its settings leave open, decided before anything is built.

`resolve(config)` decides device, precision, data, vocabulary, checkpoint, steps, micro-batch, ops.
"""

import math
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from fastgpt.autotune import choose
from fastgpt.autotune.trials import Sizes
from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Checkpoint
from fastgpt.config.checks import flag
from fastgpt.config.config import Config, by_name
from fastgpt.convert.saved import saved_config
from fastgpt.convert.source import OpenedModel, read
from fastgpt.data.dataset import Dataset
from fastgpt.data.items import Data
from fastgpt.data.order import SampleOrder
from fastgpt.data.tokenizers import load_tokenizer, same_tokenizer
from fastgpt.device import device
from fastgpt.errors import UserError, brief
from fastgpt.ops import tables
from fastgpt.ops.protocols import Ops
from fastgpt.parallel import distributed, parallelize
from fastgpt.parallel.distributed import World
from fastgpt.run import directory
from fastgpt.run.directory import resumes
from fastgpt.run.manifest import precision_asked
from fastgpt.train.data import check_splits, open_for_run, with_vocabulary
from fastgpt.train.init_from import Warn, check_architecture


@dataclass(frozen=True, slots=True)
class ResumeState:
    """Where a run begins: at a checkpoint, or without one at its first step."""

    checkpoint: Checkpoint | None = None
    settings: Config | None = None
    """Settings in the checkpoint."""
    tokens: int = 0
    """Number of tokens that the run has trained on."""
    position: dict[str, list[int]] | None = None
    """The loader's state; None: at the beginning of the data."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def changes(self, config: Config) -> list[str]:
        """Returns each setting that differs from the checkpoint's: `NAME old -> new`."""
        if self.settings is None:
            return []
        old, new = by_name(self.settings), by_name(config)
        return [f"{name} {old[name]} -> {x}" for name, x in new.items() if x != old[name]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that a run decides before it is built; ranks differ in `world` alone.

    A run saves `config` as config.json, and most of the rest in manifest.json.
    """

    config: Config
    """Settings; the size of the vocabulary and the steps are numbers now."""
    world: World
    device: str
    precision: str
    """Precision of autocast: fp32, bf16 or fp16."""
    residual_dtype: torch.dtype | None
    compiled: bool
    source: OpenedModel | None
    """Model that a new run starts from: its weights are not read yet."""
    data: Dataset
    orders: list[SampleOrder]
    """Order of the training samples of each corpus."""
    epoch_sizes: list[int]
    """Number of samples of each corpus in an epoch."""
    eval_every: int
    """Number of steps between two evaluations, as a number."""
    resumed: ResumeState
    micro_batch: int
    """Number of sequences computed at once; `build` lowers it where a GPU's memory is too small."""
    ops: Ops
    trials: dict[str, dict[str, Any]]
    """Times and errors of the ops that were tried on this GPU."""

    @property
    def sharded(self) -> bool:
        """True if each rank holds a part of each weight."""
        return parallelize.shards_weights(self.config.parallel, self.world)

    @property
    def has_forward_collectives(self) -> bool:
        """True if ranks exchange tensors in each forward."""
        return self.sharded or self.world.model_parallel_size > 1


def resolve(
    config: Config, warn: Warn = print, data: Data | None = None, world: World | None = None
) -> Plan:
    """Decides all that the settings leave open; a collective operation.

    Args:
        data: own datasets, in place of what `config.data` names.
        world: the ranks, if they have met already.

    Raises:
        UserError: settings, data, device, and the model or checkpoint to start from do not fit.
    """
    config = directory.without_auto(config)
    train, on = config.train, device.pick_device(config.train.device)
    world = world or distributed.start(on)
    world = replace(
        world, model_parallel_size=parallelize.model_parallel_size(config.parallel, world)
    )
    precision = world.on_rank0(lambda: device.pick_precision(precision_asked(config, on, warn), on))
    residual_dtype = device.pick_residual(train.residual, on, precision)
    if config.ops.attention == "flash_attn" and precision == "fp32":
        raise UserError("--ops.attention is flash_attn: expected --train.precision bf16, fp16")
    choose.require_toolchain(config.ops, on)
    compiled, note = device.pick_compile(train.compile, on, world.size)
    source = None
    if config.init_from is not None and not resumes(config.resume):
        source = read(config.init_from)
        check_architecture(config, source.config)
    for warning in [*filter(None, [note]), *(source.warnings if source else ())]:
        warn(warning)
    opened = open_for_run(config, data, source, world, warn)
    if data is not None:  # no text that a later run could find
        own = replace(config.data, source=data.name)
        size = config.model.vocab_size or data.vocab_size
        config = replace(config, data=own, model=replace(config.model, vocab_size=size))
    config = with_vocabulary(config, opened.tokenizer)
    if world.size > 1:
        parallelize.check_combination(config, precision)
    orders = opened.orders(config.model.context, config.seed)
    resumed = find_state(config, world, opened, warn)
    epoch_sizes = [order.epoch_size(0) for order in orders]
    config = _with_steps(config, sum(epoch_sizes), resumed, warn)
    eval_every = config.eval_every
    if eval_every == "epoch":
        eval_every = math.ceil(sum(epoch_sizes) / config.global_batch)
    check_splits(config, opened, orders, warn)
    micro_batch = largest_micro_batch(config, world, warn)
    residual = "bf16" if residual_dtype else None
    sizes = Sizes(config.model, micro_batch, precision, compiled, residual)
    chosen, trials = world.on_rank0(
        lambda: choose.choose(config.ops, sizes, on, warn), world.long_timeout_group()
    )
    ops = tables.select(config.ops, on, chosen)
    if config.parallel.tp > 1:
        ops = parallelize.tensor_parallel(ops)
    return Plan(
        config=config, world=world, device=on, precision=precision, compiled=compiled,
        residual_dtype=residual_dtype, source=source, data=opened, orders=orders,
        epoch_sizes=epoch_sizes, eval_every=eval_every,
        resumed=resumed, micro_batch=micro_batch, ops=ops, trials=trials,
    )  # fmt: skip


def find_state(config: Config, world: World, data: Dataset, warn: Warn) -> ResumeState:
    """Opens and verifies the checkpoint that `config.resume` names; a collective operation.

    Raises:
        UserError: no checkpoint is valid, or it belongs to another run than `config` and `data`.
    """
    if config.resume is None or not resumes(config.resume):
        return ResumeState()
    found, complaints = checkpoint.find(config.resume, world=world)
    for complaint in complaints:
        warn(f"{complaint}; the one before it is used")
    settings = saved_config(found.path)
    _check_same(found, settings, config, data)
    try:
        corpus, position = str(found.state["corpus"]), dict(found.state["loader"])
        # checkpoints of 0.2 lack it: assume that the batch size never changed
        tokens = int(found.state.get("tokens", found.step * settings.train.batch_tokens))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{found.path} does not fit this run: {brief(error)}") from error
    if corpus != data.fingerprint:
        warn(
            f"the data changed since {found.path}: reading {data.name} from its beginning"
            f" ({corpus[:12]}, now {data.fingerprint[:12]})"
        )
        position = None
    return ResumeState(found, settings, tokens, position)


def _check_same(found: Checkpoint, before: Config, config: Config, data: Dataset) -> None:
    """Raises `UserError` if tokenizer, model, optimizer, data order or seed differ."""
    kept, tokenizer = load_tokenizer(found.path / "tokenizer.json"), data.tokenizer
    if not same_tokenizer(kept, tokenizer):
        raise UserError(
            f"checkpoint {found.path} and the data have different vocabularies: {kept.kind} with "
            f"{kept.vocab_size} tokens in the checkpoint, {tokenizer.kind} with "
            f"{tokenizer.vocab_size} in the data; with equal numbers, some tokens differ"
        )
    fixed = ("optim.kind", "data.val_fraction", "data.sampling", "data.align", "seed")
    for name in (*(f"model.{field}" for field in asdict(config.model)), *fixed):
        old, new = (attrgetter(name)(settings) for settings in (before, config))
        if old != new:
            raise UserError(f"{flag(name)} is {new}: expected {old}, as in checkpoint {found.path}")


def _with_steps(config: Config, samples: int, resumed: ResumeState, warn: Warn) -> Config:
    """Converts epochs of so many samples to steps; a resumed run counts its tokens."""
    batch, asked = config.global_batch, "--steps"
    if config.epochs is not None:
        asked = f"--epochs {config.epochs} in steps"
        left = config.epochs * samples - resumed.tokens / config.model.context
        config = replace(config, steps=max(1, resumed.step + math.ceil(left / batch)))
    if resumed.checkpoint is not None and resumed.step > config.steps:
        already = f"{resumed.checkpoint.path} is already at step {resumed.step}"
        raise UserError(f"{asked} is {config.steps}: {already}")
    if (warmup := config.optim.warmup_steps) > config.steps:
        lost = "the learning rate does not reach its peak"
        warn(f"--optim.warmup-steps is {warmup}, but the run has {config.steps} steps: {lost}")
    return config


def largest_micro_batch(config: Config, world: World, warn: Warn) -> int:
    """Returns the largest size up to `train.micro_batch` that divides a rank's sequences."""
    ranks = world.dp_size
    if config.global_batch % ranks:
        raise UserError(
            f"--train.batch-tokens is {config.train.batch_tokens}: {config.global_batch} "
            f"sequences of {config.model.context}, expected a multiple of the {ranks} data-parallel"
            " ranks"
        )
    share = config.global_batch // ranks
    most = min(share, config.train.micro_batch)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    if 2 * size <= most:
        warn(
            f"{share} sequences per rank divide into micro-batches of {size} at "
            f"most (--train.micro-batch is {config.train.micro_batch}): another "
            "--train.batch-tokens would be faster"
        )
    return size
