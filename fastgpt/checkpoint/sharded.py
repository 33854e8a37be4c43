"""Tensors of which each rank holds a part, written by all ranks and read by any number of them.

Each rank writes one file `shard-*.safetensors`, in the format of PyTorch's distributed checkpoints
(DCP) for safetensors: the place of each part is in the file's header, as JSON, and no pickled
metadata is needed. What is no tensor is `state.json`.

DCP is imported when it is used: that takes a second.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastgpt.checkpoint.tensors import Weights
from fastgpt.errors import UserError, brief
from fastgpt.files import sha256_of
from fastgpt.ops.dtensor import is_sharded
from fastgpt.parallel.distributed import World
from fastgpt.parallel.fsdp import local_shard, shard_like

STATE = "state.json"
SHARDS = "shard-*.safetensors"
MODEL = "model."
"""Beginning of the names of weights; those of the state are places such as optimizers.0.step."""


def flatten_state(tree: Any, key_path: str, found: dict[str, Tensor]) -> Any:
    """Returns `tree` as JSON, with {"tensor": NAME} for its tensors, which it adds to `found`."""
    if isinstance(tree, Tensor):
        found[key_path] = tree
        return {"tensor": key_path}
    if isinstance(tree, dict):
        return {str(key): flatten_state(x, f"{key_path}.{key}", found) for key, x in tree.items()}
    if isinstance(tree, list | tuple):
        return [flatten_state(x, f"{key_path}.{i}", found) for i, x in enumerate(tree)]
    return tree


def unflatten_state(tree: Any, found: Mapping[str, Tensor]) -> Any:
    """Undoes `flatten_state`; keys that are numbers become ints again."""
    if isinstance(tree, dict):
        if tree.keys() == {"tensor"}:
            return found[tree["tensor"]]
        return {int(x) if x.isdecimal() else x: unflatten_state(y, found) for x, y in tree.items()}
    return [unflatten_state(x, found) for x in tree] if isinstance(tree, list) else tree


def write_parts(
    folder: Path,
    weights: Mapping[str, Tensor],
    state: dict[str, Any],
    world: World,
    group: dist.ProcessGroup,
) -> tuple[dict[str, str], str]:
    """Writes this rank's shards of tensors into one file of `folder`; a collective operation.

    Returns:
        tuple[dict[str, str], str]: the sha256 of each rank's file, and the text of `state.json`.

    Raises:
        OSError: a rank cannot write; it is raised on all of them.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    parts = {MODEL + name: x for name, x in weights.items()}
    plain = {key: flatten_state(x, key, parts) for key, x in state.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(parts, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        cause = error.failures[min(error.failures)][0]
        raise cause if isinstance(cause, OSError) else OSError(brief(cause)) from error
    mine = sorted(folder.glob(SHARDS))[world.rank :: world.size]
    found = world.all_gather_object({path.name: sha256_of(path) for path in mine}, group)
    hashes = {name: value for some in found for name, value in some.items()}
    return hashes, json.dumps(plain, indent=1)


class Shards:
    """The tensors in a folder's files of shards.

    Raises:
        ValueError: a part of a tensor is missing.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        self._folder, self._reader = folder, HuggingFaceStorageReader(str(folder))
        self.plan: dict[str, Tensor] = {}
        stored: Any
        for name, stored in self._reader.read_metadata().state_dict_metadata.items():
            x = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            parts = sum(math.prod(part.sizes) for part in stored.chunks)
            if parts != x.numel():
                raise ValueError(f"{parts} of {x.numel()} numbers of {name} are there")
            self.plan[name] = x

    def read_into(self, tensors: dict[str, Tensor], *, alone: bool) -> None:
        """Fills tensors from the files: ordinary ones whole, of DTensors this rank's shard.

        Args:
            alone: without the other ranks; else it is a collective operation.

        Raises:
            UserError: there is none of such a name or shape, or it cannot be read.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with warnings.catch_warnings():  # that it takes this for a single process
                warnings.simplefilter("ignore")
                load(tensors, storage_reader=self._reader, no_dist=alone)
        except Exception as error:
            raise UserError(f"the shards in {self._folder} do not fit: {brief(error)}") from error

    def restore(
        self, state: Any, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Any:
        """Reads a model's weights, and returns the state with its tensors.

        Each is read as the weight it belongs to is laid out: whole, or the rank's part of it.

        Args:
            state: content of `state.json`, as `flatten_state` returned it.
        """
        wanted = {MODEL + name: weight.detach() for name, weight in model.named_parameters()}
        for name, stored in self.plan.items():
            if not name.startswith(MODEL):
                wanted[name] = torch.zeros_like(stored, device="cpu")
        for optimizer, saved in zip(optimizers, state["optimizers"]["optimizers"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            for number, moments in saved["state"].items():
                weight = weights[int(number)].detach()
                for entry in moments.values():
                    if self.plan[entry["tensor"]].shape == weight.shape:
                        wanted[entry["tensor"]] = torch.zeros_like(weight)
        self.read_into(wanted, alone=not any(map(is_sharded, wanted.values())))
        for weight in model.parameters():
            own = weight.detach()  # with rows in the model's order
            local_shard(own).copy_(local_shard(shard_like(own, weight)))
        return unflatten_state(state, wanted)

    def whole(self, rows: Mapping[str, int]) -> Weights:
        """Returns the full weights, each read when it is asked for.

        Args:
            rows: number of rows to read of a weight, if not all of them.
        """

        def read(name: str) -> Tensor:
            found = torch.zeros_like(self.plan[MODEL + name], device="cpu")
            self.read_into({MODEL + name: found}, alone=True)
            return found[: rows.get(name)]

        plan = {
            name.removeprefix(MODEL): x[: rows.get(name.removeprefix(MODEL))]
            for name, x in self.plan.items()
            if name.startswith(MODEL)
        }
        return Weights(plan, read)
