"""Runs that are resumed: what they load from a checkpoint, and what must be the same."""

from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Checkpoint
from fastgpt.config.checks import flag
from fastgpt.config.config import Config, saved_config
from fastgpt.data.dataset import DataSet
from fastgpt.data.tokenizers import Tokenizer, load_tokenizer, same_tokenizer
from fastgpt.errors import UserError, brief
from fastgpt.guards.nonfinite import check_weights
from fastgpt.model.gpt import GPT
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import load_weights
from fastgpt.run.directory import resumes
from fastgpt.train.init_from import Warn
from fastgpt.train.optim import Optimizers


@dataclass(slots=True)
class Restored:
    """Progress of a run that is resumed from a checkpoint; that of a new run is empty."""

    step: int = 0
    path: Path | None = None
    """Checkpoint that was resumed; None: there is none."""
    state: dict[str, Any] | None = None
    """State in the checkpoint, without weights and the state of the optimizers."""


def restore(
    config: Config,
    world: World,
    tokenizer: Tokenizer,
    model: GPT,
    optimizers: Optimizers,
    warn: Warn,
) -> Restored:
    """Loads the checkpoint that `config.resume` names, if any; a collective operation.

    Args:
        tokenizer: that of the data.

    Raises:
        UserError: there is no valid checkpoint, or it does not fit.
    """
    if config.resume is None or not resumes(config.resume):
        return Restored()
    found, complaints = checkpoint.find(config.resume, world=world)
    for complaint in complaints:
        warn(f"{complaint}; the one before it is used")
    _check_same(found, config, tokenizer)
    try:
        state = dict(load(found, model, optimizers))
        del state["optimizers"]  # a copy of what the optimizers hold now
        _ = state["corpus"], dict(state["loader"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{found.path} does not fit this run: {brief(error)}") from error
    _check_finite(found, model, optimizers, world)
    if found.step > config.steps:
        asked = "--steps" if config.epochs is None else f"--epochs {config.epochs} in steps"
        raise UserError(f"{asked} is {config.steps}: {found.path} is already at step {found.step}")
    return Restored(found.step, found.path, state)


def load(found: Checkpoint, model: GPT, optimizers: Optimizers) -> dict[str, Any]:
    """Loads weights and optimizers, and returns the state; a collective operation."""
    load_weights(model, found.weights)
    optimizers.load_state_dict(found.state["optimizers"])
    return found.state


def position(restored: Restored, data: DataSet, warn: Warn) -> dict[str, list[int]] | None:
    """Returns the loader's state in a checkpoint; None: at the beginning of the data."""
    if restored.state is None:
        return None
    corpus = restored.state["corpus"]
    if corpus == data.identity:
        return dict(restored.state["loader"])
    warn(
        f"the data changed since {restored.path} ({str(corpus)[:12]}, now {data.identity[:12]}):"
        " reading the new data from its beginning"
    )
    return None


def _check_same(found: Checkpoint, config: Config, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if tokenizer, model, optimizer, data order or seed differ."""
    kept = load_tokenizer(found.path / "tokenizer.json")
    if not same_tokenizer(kept, tokenizer):
        raise UserError(
            f"checkpoint {found.path} and the data have different vocabularies: {kept.kind} with "
            f"{kept.vocab_size} tokens in the checkpoint, {tokenizer.kind} with "
            f"{tokenizer.vocab_size} in the data; with equal numbers, some tokens differ"
        )
    before = saved_config(found.path)
    fixed = ("optim.kind", "data.val_fraction", "data.sampling", "data.align", "seed")
    for name in (*(f"model.{field}" for field in asdict(config.model)), *fixed):
        old, new = (attrgetter(name)(settings) for settings in (before, config))
        if old != new:
            raise UserError(f"{flag(name)} is {new}: expected {old}, as in checkpoint {found.path}")


def _check_finite(found: Checkpoint, model: GPT, optimizers: Optimizers, world: World) -> None:
    """Raises `UserError` if a weight or a moment that was loaded is not finite."""
    states = [optimizer.state_dict()["state"] for optimizer in optimizers.all]
    moments = [x for x in tree_leaves(states) if getattr(x, "ndim", 0)]
    names = [name for name, _ in model.named_parameters()]
    names += ["the optimizer's state"] * len(moments)
    try:
        check_weights([*optimizers.parameters, *moments], names, found.step)
    except UserError as error:
        earlier = checkpoint.instead_of(found.path, True, world)
        raise UserError(f"checkpoint {found.path} is damaged: {error}; {earlier}") from error
