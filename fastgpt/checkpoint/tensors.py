"""Tensors in safetensors files, read and written one at a time, so that a model need not fit."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastgpt.checkpoint.archive import check_archive
from fastgpt.errors import UserError, brief, reason

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Name of a dtype in a safetensors file -> PyTorch's."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 2**22
"""Bytes of the header of a safetensors file; about 30,000 tensors, ten times what 256 layers have.
"""


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

    Raises:
        UserError: it cannot be read or is damaged, or a tensor has a dtype that PyTorch lacks.
    """
    try:
        plan, length = {}, header_length(path)
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                part = file.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    known = ", ".join(DTYPES)
                    raise UserError(f"{path}: {name} is of {part.get_dtype()}: expected {known}")
                plan[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        with path.open("rb") as file:
            file.seek(8)
            header = json.loads(file.read(length))
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: too large a shape
        raise UserError(f"{path} cannot be read: {reason(error)}") from error

    def tensor(name: str) -> Tensor:
        # not by safe_open: it would read the header again, or keep in memory what was read
        x, begin = plan[name], header[name]["data_offsets"][0]
        octets = np.fromfile(path, np.uint8, x.nbytes, offset=8 + length + begin)
        if octets.size < x.nbytes:
            raise OSError(f"{name} ends after {octets.size:,} of {x.nbytes:,} bytes")
        return torch.from_numpy(octets).view(x.dtype).view(x.shape)

    return Weights(plan, tensor)


def unpickle(path: Path, *, mmap: bool = False) -> Any:
    """Loads what torch.save wrote, without running code that the file names.

    Args:
        mmap: tensors stay in the file until they are read.

    Raises:
        UserError: it cannot be read, or holds other objects than tensors and plain values.
    """
    try:
        check_archive(path)
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:  # a damaged pickle ends in almost any
        raise UserError(f"{path} cannot be read: {brief(error)}") from error


def header_length(path: Path) -> int:
    """Returns the length of the header of a safetensors file, in bytes.

    Raises:
        UserError: it is so long that reading it would take much time and memory.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if LONGEST_HEADER < length < path.stat().st_size:
        raise UserError(
            f"{path} has a header of {length:,} bytes: expected at most {LONGEST_HEADER:,}"
        )
    return length


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
