"""Checkpoints of version 0.2 that ranks wrote together, each its parts of the tensors.

A rank's file is `shard-*.safetensors`, with the place of each part in its header, as PyTorch's
distributed checkpoints have it. What is no tensor is in `state.json`, where {"tensor": NAME} stands
for a tensor; names of weights begin with `model.`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fastgpt.checkpoint.tensors import Weights, in_memory
from fastgpt.files import parse_json

STATE = "state.json"
MODEL = "model."


def read_parts(folder: Path, names: Iterable[str]) -> tuple[Weights, dict[str, Any]]:
    """Returns the whole weights of a checkpoint, and its state.

    Args:
        names: its files.

    Raises:
        ValueError: a part of a tensor is missing. Other damage ends in almost any error.
    """
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for shard in sorted(name for name in names if name.startswith("shard-")):
        with safe_open(folder / shard, "pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                place = places[name]["saved_offsets"]
                parts.setdefault(name, []).append((place, file.get_tensor(name)))
    found = {name: _joined(name, some) for name, some in parts.items()}
    state = parse_json((folder / STATE).read_text())
    rows = state.get("rows", {})  # of the vocabulary, without padding
    ours = [name.removeprefix(MODEL) for name in found if name.startswith(MODEL)]
    weights = {name: found[MODEL + name][: rows.get(name)] for name in ours}
    return in_memory(weights), _with_tensors(state, found)


def _joined(name: str, parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """Puts parts of a tensor, each with the place of its first number, in their places."""
    ends = [[at + n for at, n in zip(place, part.shape)] for place, part in parts]
    shape = [max(axis) for axis in zip(*ends)]
    count = sum(part.numel() for _, part in parts)
    if count != math.prod(shape):
        raise ValueError(f"{count} of {math.prod(shape)} numbers of {name} are there")
    whole = torch.empty(shape, dtype=parts[0][1].dtype)
    for place, part in parts:
        whole[tuple(slice(at, at + n) for at, n in zip(place, part.shape))] = part
    return whole


def _with_tensors(tree: Any, found: Mapping[str, Tensor]) -> Any:
    """Returns a state with its tensors; keys that are numbers become ints again."""
    if isinstance(tree, dict):
        if tree.keys() == {"tensor"}:
            return found[tree["tensor"]]
        return {int(x) if x.isdecimal() else x: _with_tensors(y, found) for x, y in tree.items()}
    return [_with_tensors(x, found) for x in tree] if isinstance(tree, list) else tree
