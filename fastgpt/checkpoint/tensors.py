"""Tensors in safetensors files, read and written one at a time, so that a model need not fit."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastgpt.errors import UserError, brief, reason

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Dtype -> its name in a safetensors file."""


class Weights(Mapping[str, Tensor]):
    """Tensors by name, each read anew whenever it is asked for.

    Args:
        plan: the same tensors on the device `meta`: shapes and dtypes without values.
        read: reads the tensor of a name, on the CPU.
    """

    def __init__(self, plan: dict[str, Tensor], read: Callable[[str], Tensor]) -> None:
        self.plan, self._read = plan, read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.plan:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan)

    def __len__(self) -> int:
        return len(self.plan)

    def to(self, dtype: torch.dtype) -> "Weights":
        """Returns the same tensors, converted to `dtype` when they are read."""
        plan = {name: x.to(dtype) for name, x in self.plan.items()}
        return Weights(plan, lambda name: self[name].to(dtype))


def in_memory(tensors: Mapping[str, Tensor]) -> Weights:
    """Returns tensors that are in memory, or mapped into it, as `Weights`."""
    return Weights({name: x.to("meta") for name, x in tensors.items()}, tensors.__getitem__)


def read(path: Path) -> Weights:
    """Opens a safetensors file, of which only the header is read at once.

    Raises `UserError` if it cannot be read or is damaged, or a tensor has another dtype than
    `NAMES`; also when a tensor is asked for later, as another process may have removed the file.
    """

    def tensor(name: str) -> Tensor:
        with _opened(path) as file:  # opened anew: what was read need not stay in memory
            return file.get_tensor(name)

    with _opened(path) as file:  # it maps the file, so that no tensor is read here
        plan = {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118
    for name, x in plan.items():
        if x.dtype not in NAMES:
            raise UserError(f"{path}: {name} is {x.dtype}: expected {', '.join(NAMES.values())}")
    return Weights(plan, tensor)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, RuntimeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def unpickle(path: Path, *, mmap: bool = False) -> Any:
    """Loads what torch.save wrote, without running code that the file names.

    With `mmap`, tensors stay in the file until they are read. Raises `UserError` if it cannot be
    read, or holds other objects than tensors and plain values.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:  # a damaged pickle ends in almost any
        raise UserError(f"{path} cannot be read: {brief(error)}") from error


def write(path: Path, plan: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Writes a safetensors file, with one tensor in memory at a time.

    Args:
        plan: shape and dtype of each tensor, which may be on the device `meta`.
        tensors: the tensors in the order of `plan`, on any device; more are not taken.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(plan, key=lambda name: -plan[name].itemsize):  # each aligned to its size
        x, begin = plan[name], end
        end += x.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": NAMES[x.dtype], "shape": [*x.shape], "data_offsets": offsets}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name, x in zip(plan, tensors):
            file.seek(8 + len(content) + header[name]["data_offsets"][0])
            file.write(octets(x).data)


def octets(x: Tensor) -> np.ndarray:
    """Returns the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
