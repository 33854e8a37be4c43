"""Tensors in safetensors files, read one at a time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastgpt.errors import UserError, brief, reason


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
    """Opens a safetensors file, and reads its header alone.

    Raises `UserError` if it cannot be read or is damaged; also when a tensor is asked for later, as
    another process may have removed the file.
    """

    def tensor(name: str) -> Tensor:
        with _opened(path) as file:  # opened anew: what was read need not stay in memory
            return file.get_tensor(name)

    with _opened(path) as file:  # it maps the file, so that no tensor is read here
        plan = {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118
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


def write(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file; all its tensors are in memory at once, on the CPU.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    try:
        path.touch()
        mode = path.stat().st_mode  # the umask's; the package lets nobody else read the file
        save_file({name: x.contiguous() for name, x in weights.items()}, path, {"format": "pt"})
        path.chmod(mode)
    except SafetensorError as error:  # its message ends with the system's
        raise OSError(str(error)) from error
