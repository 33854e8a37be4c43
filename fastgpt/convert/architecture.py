"""How a model of another program corresponds to one of ours: settings, and names of tensors.

Tensors keep their bits: they are renamed, transposed, cut into query, key and value or put
together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError, shown

HFConfig = dict[str, Any]
"""Content of a config.json of Hugging Face."""
Required = dict[str, tuple[Any, ...]]
"""Field of `ModelConfig` -> values that a program can express."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How one of our tensors is stored by others."""

    names: tuple[str, ...]
    """Names of the others' tensors, which hold the rows of ours one after the other."""
    shape: torch.Size
    """Shape of our tensor."""
    rows: tuple[int, ...] = ()
    """Numbers of rows of the others' tensors; empty for a single one."""
    transposed: bool = False
    constant: float | None = None
    """Value of all elements if our model has no such tensor; None: it has one."""

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the others' tensors."""
        joined = tuple(reversed(self.shape)) if self.transposed else tuple(self.shape)
        return [(rows, *joined[1:]) for rows in self.rows] if self.rows else [joined]

    def ours(self, parts: list[Tensor]) -> Tensor:
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.T.contiguous() if self.transposed else joined

    def theirs(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        joined = x.T.contiguous() if self.transposed else x
        yield from zip(self.names, joined.split(self.rows) if self.rows else [joined])


class ConfigReader:
    """An object of a config.json that is read field by field, and knows which were not."""

    def __init__(self, settings: HFConfig, where: str = "config.json") -> None:
        self._settings, self._read, self._where = settings, set(IGNORED), where

    def get(self, name: str, kind: type, *default: Any) -> Any:
        """Returns a field, or the default if it is missing or null.

        Args:
            kind: `int`, `float` (which an integer is, too), `bool`, `str`, `list` or `dict`.

        Raises:
            UserError: it is missing and there is no default, or it is of another kind.
        """
        self._read.add(name)
        value = self._settings.get(name)
        if value is None and default:
            return default[0]
        if type(value) is int and kind is float:
            value = float(value)
        if type(value) is not kind:
            said = "has no" if value is None else "has the wrong"
            raise UserError(
                f"{self._where} {said} {name}: expected {kind.__name__}, got {shown(value)}"
            )
        return value

    def inner(self, name: str) -> "ConfigReader":
        """Returns the fields of an object, which may be missing."""
        return ConfigReader(self.get(name, dict, {}), f"{self._where}, {name}")

    def require(self, name: str, *allowed: Any) -> Any:
        """Returns a field, by default the first value allowed.

        Raises:
            UserError: it has another value.
        """
        self._read.add(name)
        value = self._settings.get(name)
        value = allowed[0] if value is None else value
        if value not in allowed:
            raise UserError(
                f"{self._where}: {name} is {shown(value)}: expected {either(allowed)}, since"
                " fastgpt has nothing else"
            )
        return value

    def unknown(self) -> list[str]:
        return sorted(self._settings.keys() - self._read)


IGNORED: tuple[str, ...] = (
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "fastgpt", "gradient_checkpointing", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_window_layers", "model_type", "n_ctx",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "reorder_and_upcast_attn", "return_dict", "sliding_window", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
"""Fields that say nothing of what the model computes, or only together with one that is checked."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of transformers."""

    class_name: str
    model_type: str
    required: Required
    table: dict[str, tuple[Any, ...]]
    """Their fields -> ours, the kind of the value, and its default if the field may be missing."""
    read: Callable[[ConfigReader], HFConfig]
    """Translates other fields of theirs to ours; a `UserError` if our model cannot express them."""
    write: Callable[[ModelConfig], HFConfig]
    """Translates what is not in the table to their fields."""
    tensor: Callable[[str, torch.Size, ModelConfig], TensorMap]
    """Returns where our tensor of a name and shape is."""
    prefix: str
    """Beginning of the names of all tensors but the head's, where files may lack it."""
    defaults: HFConfig = field(default_factory=dict)
    """Changes of our settings with which a model has all tensors that theirs always have."""


# What no other program has; a soft cap or a mask of documents would be lost unseen.
NONE_HAS: Required = {
    "architecture": ("gpt",), "norm_position": ("pre",), "head_bias": (False,),
    "score_scale": ("head",), "softcap": (None,), "window": (None,), "document_mask": (False,),
}  # fmt: skip


def either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(str, values))
