"""Plan of a run: all that a command line and its settings leave open, decided before it is built.

configure(argv)    settings of a recipe, a saved run or a model, then of a file and of flags
resolve(config)    device, precision, data, vocabulary, checkpoint, steps, micro-batch and ops
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastgpt import flags
from fastgpt.autotune import choose
from fastgpt.autotune.trials import Sizes
from fastgpt.config.config import CONVERTED, Config
from fastgpt.config.files import read_settings, with_settings
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.saved import saved_config
from fastgpt.convert.source import OpenedModel, read
from fastgpt.data.dataset import Dataset
from fastgpt.data.items import Data
from fastgpt.data.order import SampleOrder
from fastgpt.device import device
from fastgpt.display import command
from fastgpt.errors import UsageError, UserError, unknown_name
from fastgpt.ops import tables
from fastgpt.ops.protocols import Ops
from fastgpt.parallel import distributed, parallelize
from fastgpt.parallel.distributed import World
from fastgpt.run.directory import find_run, resumes
from fastgpt.run.manifest import precision_asked
from fastgpt.train.data import check_splits, open_for_run, with_vocabulary
from fastgpt.train.init_from import Warn, check_architecture, with_architecture
from fastgpt.train.resume import ResumeState, find_state

FOREIGN_FLAGS = {
    "batch-size": "--train.micro-batch", "per-device-train-batch-size": "--train.micro-batch",
    "gradient-accumulation-steps": "--train.batch-tokens (tokens in a step)",
    "max-iters": "--steps", "num-train-epochs": "--epochs", "learning-rate": "--optim.lr",
    "warmup-iters": "--optim.warmup-steps", "weight-decay": "--optim.weight-decay",
    "block-size": "--model.context", "n-embd": "--model.dim", "n-layer": "--model.num-layers",
    "n-head": "--model.num-heads", "wandb": "--track wandb", "wandb-log": "--track wandb",
    "dataset": "--data.source", "eval-interval": "--eval-every", "out-dir": "--run-dir",
    "output-dir": "--run-dir", "compile": "--train.compile", "dtype": "--train.precision",
    "device": "--train.device", "max-steps": "--steps", "log-interval": "--log-every",
}  # fmt: skip
"""Flags of nanoGPT and of Hugging Face's Trainer, and ours for the same."""


# --- the settings ---------------------------------------------------------------------------------


def configure(argv: Sequence[str]) -> Config:
    """Returns the settings that a command line `[RECIPE] [--FLAG VALUE ...]` asks for.

    Raises:
        UserError: unknown recipe, flag or run, or an impossible value.
    """
    default, _, words = find_defaults(argv)
    names = [word.split("=")[0].replace("_", "-") for word in words]
    if found := [name for name in names if name.startswith("--") and name[2:] in FOREIGN_FLAGS]:
        ours = ", ".join(f"{name} is {FOREIGN_FLAGS[name[2:]]}" for name in found)
        raise UserError(f"flags of other programs, which have other names here: {ours}")
    prog = f"{command('python train.py')} [RECIPE]"
    config = flags.parse(Config, words, prog=prog, default=default, first="one recipe")
    if {"--steps", "--epochs"} <= {*names}:
        raise UserError("--steps and --epochs are both given: expected one of them")
    if "--steps" in names:
        config = replace(config, epochs=None)
    if default.resume is not None:  # not the word `auto`, but the run that it found
        return replace(config, resume=default.resume)
    return config


def find_defaults(argv: Sequence[str], header: bool = True) -> tuple[Config, str, list[str]]:
    """Finds the defaults of a command line's flags: a recipe's, a model's, a file's or a run's.

    Args:
        header: False to leave out the architecture of the model that --init-from names.

    Returns:
        tuple[Config, str, list[str]]: the defaults, where they come from, and the words of the
            flags and their values.
    """
    words = [*argv]
    named = words.pop(0) if words and not words[0].startswith("-") else None
    given, words = _pop_value(words, "--config")
    if given == "":
        raise UsageError("--config has no value: expected a file with settings")
    file = None if given is None else Path(given)
    settings = {} if file is None else read_settings(file)
    in_file = settings.pop("recipe", named)
    if named not in (None, in_file):
        raise UserError(f"{file} is of recipe {in_file}: expected that, not {named}")
    recipe = in_file or ("gpt2-124m" if torch.cuda.is_available() else "baby")
    if str(recipe) not in RECIPES:
        raise unknown_name("recipe", str(recipe), RECIPES, also="--config FILE")
    about, plain = RECIPES[recipe]
    about = f"recipe {recipe}: {about}" if file is None else f"{file}, of recipe {recipe}"
    resume, run_dir, init_from = (
        _pop_value(words, flag)[0] or None for flag in ("--resume", "--run-dir", "--init-from")
    )
    if resume is not None and file is not None:
        raise UserError(f"--config is {file}: a resumed run has its settings: expected flags alone")
    if resume is not None and (
        found := find_run(resume, Path(run_dir) if run_dir else None, recipe)
    ):
        run, path = found
        saved = _saved(run, resume, init_from, in_file)
        return replace(saved, run_dir=run, resume=str(path)), f"the run {run}", words
    init_from = init_from or settings.get("init_from", plain.init_from)
    if header and init_from not in (None, "None"):
        plain = with_architecture(plain, str(init_from))
    return with_settings(plain, settings, file), about, words


def _pop_value(words: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Returns the value of a flag that decides the defaults of the others, and the other words.

    Without a value it is an empty text; None: the flag is not given.
    """
    for at, word in reversed([*enumerate(words)]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            rest = words[at + 1 :]
            if not equals and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            return value, words[:at] + rest
    return None, words


def _saved(run: Path, resume: str, init_from: str | None, recipe: str | None) -> Config:
    """Returns the settings of a run that is resumed, after checks of what was given with it."""
    saved = saved_config(run)
    if saved.recipe == CONVERTED:
        raise UserError(
            f"{run} cannot be resumed: it was converted from another program's model, and has no"
            f" optimizer state: start a new run from it with --init-from {run}"
        )
    continues = resume == "auto" and init_from == saved.init_from
    if init_from not in (None, "None") and not continues:
        raise UserError(
            f"--init-from is {init_from}: {run} is resumed, which began with"
            f" {saved.init_from}: expected no --init-from, or another --run-dir without --resume"
        )
    if recipe not in (None, saved.recipe):
        raise UserError(f"{run} is a run of recipe {saved.recipe!r}: expected that, not {recipe!r}")
    return saved


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that a run decides before it is built; ranks differ in `world` alone.

    A run saves `config` as config.json, and the rest in manifest.json.
    """

    config: Config
    """Settings; vocabulary, steps and intervals are numbers now."""
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
