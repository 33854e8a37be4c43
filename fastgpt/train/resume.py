"""Runs that are resumed: what they load from a checkpoint, and what must be the same."""

import json
import math
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Checkpoint
from fastgpt.config.checks import flag
from fastgpt.config.config import Config, flat, saved_config, to_json
from fastgpt.data.dataset import Dataset
from fastgpt.data.tokenizers import Tokenizer, load_tokenizer, same_tokenizer
from fastgpt.errors import UserError, brief
from fastgpt.guards.nonfinite import check_weights
from fastgpt.model.gpt import GPT
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import load_weights
from fastgpt.run.directory import resumed_name, resumes
from fastgpt.train.init_from import Warn
from fastgpt.train.optim import Optimizers


def check_same_command(config: Config, world: World) -> None:
    """Raises `UserError` on all ranks if their settings differ, or what they resume."""
    own = {"resume": resumed_name(config.resume)} | flat(json.loads(to_json(config)))
    main = world.broadcast_object(own)
    differing = [(name, str(x), str(main[name])) for name, x in own.items() if x != main[name]]
    found = world.all_gather_object(differing[:1])
    if others := [rank for rank, differs in enumerate(found) if differs]:
        name, theirs, ours = found[others[0]][0]
        raise UserError(
            f"{flag(name)} is {theirs} on rank {', '.join(map(str, others))}, and {ours} on rank 0:"
            " expected the same on all ranks"
        )


@dataclass(slots=True)
class Restored:
    """Progress of a run that is resumed from a checkpoint; that of a new run is empty."""

    step: int = 0
    path: Path | None = None
    """Checkpoint that was resumed; None: there is none."""
    state: dict[str, Any] | None = None
    """State in the checkpoint, without weights and the state of the optimizers."""
    tokens: int = 0
    """Number of tokens that the run has trained on."""
    settings: Config | None = None
    """Settings in the checkpoint."""

    def changes(self, config: Config) -> list[str]:
        """Returns each setting that differs from the checkpoint's: `NAME old -> new`."""
        if self.settings is None:
            return []
        old, new = (flat(json.loads(to_json(x))) for x in (self.settings, config))
        return [f"{name} {old[name]} -> {x}" for name, x in new.items() if x != old[name]]


def restore(
    config: Config,
    world: World,
    tokenizer: Tokenizer,
    model: GPT,
    optimizers: Optimizers,
    warn: Warn,
) -> Restored:
    """Loads the checkpoint that `config.resume` names, if any; a collective operation.

    It is a `UserError` if there is no valid checkpoint, or it does not fit, as with another
    `tokenizer` than the data's.
    """
    if config.resume is None or not resumes(config.resume):
        return Restored()
    found, complaints = checkpoint.find(config.resume, world=world)
    for complaint in complaints:
        warn(f"{complaint}; the one before it is used")
    before = saved_config(found.path)
    _check_same(found, before, config, tokenizer)
    try:
        state = dict(load(found, model, optimizers))
        del state["optimizers"]  # a copy of what the optimizers hold now
        _ = state["corpus"], dict(state["loader"])
        # checkpoints of 0.2 lack it: no batch before is known but their own
        tokens = int(state.get("tokens", found.step * before.train.batch_tokens))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{found.path} does not fit this run: {brief(error)}") from error
    _check_finite(found, model, optimizers, world)
    return Restored(found.step, found.path, state, tokens, before)


def with_steps_left(config: Config, restored: Restored, samples: int) -> Config:
    """Returns settings whose `steps` end a run that is resumed where `epochs` says.

    A batch may have another size than before: then `steps` are those taken and those left.

    Args:
        samples: number of samples in an epoch.
    """
    step, asked = restored.step, "--steps"
    if config.epochs is not None:
        asked = f"--epochs {config.epochs} in steps"
        if restored.tokens != step * config.train.batch_tokens:
            left = config.epochs * samples - restored.tokens / config.model.context
            config = replace(config, steps=max(1, step + math.ceil(left / config.global_batch)))
    if step > config.steps:
        raise UserError(f"{asked} is {config.steps}: {restored.path} is already at step {step}")
    return config


def load(found: Checkpoint, model: GPT, optimizers: Optimizers) -> dict[str, Any]:
    """Loads weights and optimizers, and returns the state; a collective operation."""
    load_weights(model, found.weights)
    optimizers.load_state_dict(found.state["optimizers"])
    return found.state


def position(restored: Restored, data: Dataset, warn: Warn) -> dict[str, list[int]] | None:
    """Returns the loader's state in a checkpoint; None: at the beginning of the data."""
    if restored.state is None:
        return None
    corpus = restored.state["corpus"]
    if corpus == data.fingerprint:
        return dict(restored.state["loader"])
    warn(
        f"the data changed since {restored.path}: reading {data.name} from its beginning"
        f" ({str(corpus)[:12]}, now {data.fingerprint[:12]})"
    )
    return None


def _check_same(found: Checkpoint, before: Config, config: Config, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if tokenizer, model, optimizer, data order or seed differ."""
    kept = load_tokenizer(found.path / "tokenizer.json")
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


def _check_finite(found: Checkpoint, model: GPT, optimizers: Optimizers, world: World) -> None:
    """Raises `UserError` if a weight or a moment that was loaded is not finite."""
    states = [optimizer.state_dict()["state"] for optimizer in optimizers.all]
    moments = [x for x in tree_leaves(states) if getattr(x, "ndim", 0)]
    names = [name for name, _ in model.named_parameters()]
    names += ["the optimizer's state"] * len(moments)
    try:
        check_weights([*optimizers.parameters, *moments], names, found.step)
    except UserError as error:
        earlier = checkpoint.previous_valid(found.path, True, world)
        raise UserError(f"checkpoint {found.path} is damaged: {error}; {earlier}") from error
