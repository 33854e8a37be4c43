"""Runs that are resumed: the state that they go on from, and what must be the same."""

import json
from dataclasses import asdict, dataclass
from operator import attrgetter

from torch.utils._pytree import tree_leaves

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Checkpoint
from fastgpt.config.checks import flag
from fastgpt.config.config import Config, flat, to_json
from fastgpt.convert.saved import saved_config
from fastgpt.data.dataset import Dataset
from fastgpt.data.tokenizers import load_tokenizer, same_tokenizer
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
        old, new = (flat(json.loads(to_json(x))) for x in (self.settings, config))
        return [f"{name} {old[name]} -> {x}" for name, x in new.items() if x != old[name]]


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


def restore(found: Checkpoint, model: GPT, optimizers: Optimizers, world: World) -> None:
    """Loads weights and optimizers from a checkpoint; a collective operation.

    Raises:
        UserError: they do not fit, or a weight or a moment is not finite.
    """
    try:
        load_weights(model, found.weights)
        # removed from the state: the optimizers have a copy
        optimizers.load_state_dict(found.state.pop("optimizers"))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"{found.path} does not fit this run: {brief(error)}") from error
    states = [optimizer.state_dict()["state"] for optimizer in optimizers.all]
    moments = [x for x in tree_leaves(states) if getattr(x, "ndim", 0)]
    moments = {f"the optimizer's state {number}": x for number, x in enumerate(moments)}
    try:
        check_weights(optimizers.named | moments, found.step)
    except UserError as error:
        earlier = checkpoint.previous_valid(found.path, True, world)
        raise UserError(f"checkpoint {found.path} is damaged: {error}; {earlier}") from error
