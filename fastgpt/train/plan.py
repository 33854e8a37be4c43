"""Plan of a run: all that its settings leave open is decided here, once, before it is built.

`fastgpt.cli.parse` turns a command line into a `Config`, `resolve` turns that into a `Plan`, and
`fastgpt.train.engine` builds the model, the optimizers and the loader from it. After `resolve` no
setting changes. A run saves its settings as config.json, and the rest of the plan in manifest.json.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from fastgpt.autotune import choose
from fastgpt.autotune.trials import Sizes
from fastgpt.config.config import Config
from fastgpt.convert.source import OpenedModel, read
from fastgpt.data.dataset import DataSet
from fastgpt.data.items import Data
from fastgpt.data.order import SampleOrder
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.device import device
from fastgpt.errors import UserError
from fastgpt.ops import tables
from fastgpt.ops.protocols import Ops
from fastgpt.parallel import distributed
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import check_combination
from fastgpt.parallel.mesh import model_ranks, non_dp_size, shards_weights
from fastgpt.run.directory import resumes
from fastgpt.run.manifest import precision_asked
from fastgpt.train import init_from
from fastgpt.train.data import check_splits, open_for_run
from fastgpt.train.init_from import Warn
from fastgpt.train.micro_batch import largest_micro_batch, least_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run as it was resolved: its settings, and what they left open."""

    config: Config
    """The vocabulary, steps and intervals are numbers; of the ops it has what was asked for."""
    world: World
    device: str
    precision: str
    """Precision of autocast: fp32, bf16 or fp16."""
    narrow_residual: bool
    compiled: bool
    sharded: bool
    """True if each rank holds a part of each weight."""
    ops: Ops
    trials: dict[str, Any]
    """Verdicts of `fastgpt.autotune` on the ops that were left to it."""
    micro_batch: int
    """Sequences of a micro-step, if memory does not ask for fewer."""
    source: OpenedModel | None
    """Model that a new run starts from; None: there is none, or a checkpoint is resumed."""
    data: DataSet
    orders: list[SampleOrder]
    """Order of the samples of each corpus."""
    epoch_sizes: list[int]
    """Number of samples of each corpus in an epoch."""
    coverage: list[float]
    """Share of each corpus's tokens that an epoch reads."""

    @property
    def has_forward_collectives(self) -> bool:
        """True if ranks exchange tensors in each forward."""
        return self.sharded or self.world.non_dp_size > 1


def resolve(
    config: Config, warn: Warn = print, data: Data | None = None, source: OpenedModel | None = None
) -> Plan:
    """Decides what a run's settings leave open; a collective operation of the ranks.

    Args:
        data: own data sets, in place of what `config.data` names.
        source: the model that `config.init_from` names, if it is open already.

    Raises:
        UserError: the settings, the data, the model to start from and the device do not fit
            together.
    """
    on = device.pick_device(config.train.device)
    world = distributed.start(on)
    world = replace(world, non_dp_size=non_dp_size(config.parallel, world))
    precision = world.on_rank0(lambda: device.pick_precision(precision_asked(config, on, warn), on))
    sharded = shards_weights(config.parallel, world)
    narrow = device.pick_residual(config.train.residual, on, precision)
    if sharded:
        check_combination(config, precision)
    if config.ops.attention == "flash_attn" and precision == "fp32":
        raise UserError("--ops.attention is flash_attn: expected --train.precision bf16, fp16")
    choose.require_toolchain(config.ops, on)
    compiled, note = device.pick_compile(config.train.compile, on, world.size)
    if note:
        warn(note)
    if config.init_from is None or resumes(config.resume):
        source = None
    else:
        source = source or read(config.init_from)
        for warning in source.warnings:
            warn(warning)
    opened = open_for_run(config, data, source, world, warn)
    if data is not None:  # no text that a later run could find
        own = replace(config.data, source=data.name)
        size = config.model.vocab_size or data.vocab_size
        config = replace(config, data=own, model=replace(config.model, vocab_size=size))
    orders = opened.orders(config.model.context, config.seed)
    epoch_sizes = [order.epoch_size(0) for order in orders]
    config = with_vocabulary(config, opened.tokenizer)
    if source is not None:
        init_from.check_architecture(config, source.config)
    samples, batch = sum(epoch_sizes), config.global_batch
    if config.epochs is not None:
        config = replace(config, steps=math.ceil(config.epochs * samples / batch))
    if config.eval_epochs is not None:
        config = replace(config, eval_every=math.ceil(config.eval_epochs * samples / batch))
    device.check_free_memory(on, least_bytes(config) // model_ranks(config.parallel, world))
    coverage = [order.coverage() for order in orders]
    check_splits(config, opened, coverage, warn)
    micro_batch = largest_micro_batch(config, world, warn)
    sizes = Sizes(config.model, micro_batch, precision, compiled, narrow)
    chosen, trials = world.on_rank0(
        lambda: choose.choose(config.ops, sizes, on, warn), world.patient_group()
    )
    return Plan(
        config=config, world=world, device=on, precision=precision, narrow_residual=narrow,
        compiled=compiled, sharded=sharded, ops=tables.select(chosen, on), trials=trials,
        micro_batch=micro_batch, source=source, data=opened, orders=orders,
        epoch_sizes=epoch_sizes, coverage=coverage,
    )  # fmt: skip


def with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """Fills in the size of the vocabulary, and the end-of-text token for a document mask.

    The vocabulary has as many tokens as the tokenizer, unless `config` asks for more.

    Raises:
        UserError: `config` asks for fewer, or the mask needs an end-of-text token that is missing.
    """
    asked, needed = config.model.vocab_size, tokenizer.vocab_size
    if asked is not None and asked < needed:
        raise UserError(
            f"--model.vocab-size is {asked}: the {tokenizer.kind} tokenizer needs at least {needed}"
        )
    eot_id = tokenizer.eot_id if config.model.document_mask else None
    if config.model.document_mask and eot_id is None:
        raise UserError(
            f"--model.document-mask: the {tokenizer.kind} tokenizer has no end-of-text token to"
            " tell documents apart: use another tokenizer, for example gpt2"
        )
    model = replace(config.model, vocab_size=asked or needed, eot_id=eot_id)
    return replace(config, model=model)
