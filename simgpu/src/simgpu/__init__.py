"""Simulated CUDA GPUs for the CUDA build of PyTorch and for Triton, on a machine without any.

`python -m simgpu script.py` runs a program on them; `start`, before torch is imported, does the
same for the running process and those that it starts.
"""

import atexit
import ctypes
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["Work", "counts", "environment", "size", "start", "trace", "waits"]

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
SOURCE = None if "site-packages" in __file__ else Path(__file__).parents[1]
"""Folder of the package where it is not installed, for processes that are started."""
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size(text: str) -> int:
    """Returns the bytes that a text such as 2GiB or 512MiB means.

    Raises:
        ValueError: it has no such form.
    """
    number, unit = text.rstrip("BGKMi"), text[len(text.rstrip("BGKMi")) :]
    if not number.isdigit() or unit not in ("", *UNITS):
        raise ValueError(f"{text!r} is no size: expected one such as 2GiB, 512MiB or 4096")
    return int(number) * UNITS.get(unit, 1)


def environment(
    arch: int = 90, gpus: int = 1, memory: str | int = "2GiB", fail: str = ""
) -> dict[str, str]:
    """Returns the variables that give a new process simulated GPUs; builds them where needed.

    Args:
        arch: compute capability, such as 90 for sm_90.
        gpus: how many.
        memory: of each, in bytes or as text.
        fail: calls that fail, as NAME:N or NAME:N:CODE with commas between: the N-th call of an
            entry of the driver, the runtime or NCCL, such as cudaMalloc:3.
    """
    from simgpu.build import built

    folder = built()
    return {
        "SIMGPU": str(folder),
        "SIMGPU_ARCH": str(arch),
        "SIMGPU_GPUS": str(gpus),
        "SIMGPU_MEMORY": str(size(memory) if isinstance(memory, str) else memory),
        "SIMGPU_FAIL": fail,
        # a cubin that the real assembler made has no PTX behind it, and the key does not tell them
        **{name: os.environ.get(name, str(folder / place)) for name, place in CACHES.items()},
        "LD_LIBRARY_PATH": _first("LD_LIBRARY_PATH", folder),
        "PYTHONPATH": _first("PYTHONPATH", folder / "hook", last=SOURCE),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_PTXAS_PATH": str(folder / "ptxas"),
        "TRITON_PTXAS_BLACKWELL_PATH": str(folder / "ptxas-blackwell"),
    }


def _first(name: str, folder: Path, last: Path | None = None) -> str:
    """Returns a variable that lists folders, with one in front and perhaps one at the end."""
    ours = [str(folder), str(last or "")]
    rest = [place for place in os.environ.get(name, "").split(os.pathsep) if place not in ours]
    return os.pathsep.join(filter(None, [ours[0], *rest, ours[1]]))


def start(
    arch: int = 90, gpus: int = 1, memory: str | int = "2GiB", fail: str = ""
) -> dict[str, str]:
    """Gives simulated GPUs to this process and those that it starts; takes `environment`'s options.

    Returns:
        dict[str, str]: the variables that were set.

    Raises:
        RuntimeError: torch was imported before.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: expected simgpu.start() before it")
    variables = environment(arch, gpus, memory, fail)
    os.environ.update(variables)
    folder = Path(variables["SIMGPU"])
    sys.path.insert(0, str(folder / "hook"))
    for path in (folder / "libcuda.so.1", *sorted(folder.glob("lib*.so.*"))):
        if path.suffix != ".key":  # a stamp of the build
            ctypes.CDLL(str(path))
    return variables


def counts() -> Counter[str]:
    """Returns how often each entry was called, and what else happened, in this process so far."""
    found: Counter[str] = Counter()
    each = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)

    def note(name: bytes, n: int) -> None:
        found[name.decode()] = n

    ctypes.CDLL("libcuda.so.1").simgpu_each_count(each(note))
    return found


def waits() -> Counter[str]:
    """Returns how often this process waited for a device so far, by "file:line in function".

    That is the line nearest to the call that is neither PyTorch's nor Triton's.
    """
    from simgpu import lines

    return lines.waits()


class Work(NamedTuple):
    """A launch, a copy, a fill or a collective, as `trace` finds it."""

    name: str
    """A kernel's name, aten's of an operator, which counts as one launch, or NCCL's."""
    stream: int
    thread: int
    """That which asked for it, by `threading.get_native_id`; autograd has one for each device."""
    read: float
    """Bytes that it reads, each once."""
    written: float
    multiply_adds: float
    """Multiplications of an operator's matrix product; 0 for kernels and attention."""


@contextmanager
def trace() -> Iterator[list[Work]]:
    """Gives a list, which at the end has what was done on the devices meanwhile, in order."""
    cuda, found = ctypes.CDLL("libcuda.so.1"), []
    number = ctypes.c_double
    each = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_long, number, number, number
    )

    def note(
        name: bytes, stream: int | None, thread: int, read: float, written: float, products: float
    ) -> None:
        work = Work(name.decode(), stream or 0, thread, read, written, products)
        same = found and work.name == "attention" == found[-1].name
        if same and work.stream == found[-1].stream:  # it tells of each of its tensors
            was = found.pop()
            work = was._replace(read=was.read + read, written=was.written + written)
        found.append(work)

    cuda.simgpu_trace(True)
    try:
        yield found
    finally:
        cuda.simgpu_trace(False)
        cuda.simgpu_each_traced(each(note))


def _after_torch() -> None:
    """Called by `import torch` at its end, where `environment` has put the hook on the path."""
    if "SIMGPU" not in os.environ:  # the entry point of an earlier version is still installed
        return
    # A thread of autograd that still wants the lock of Python when that ends would abort it: while
    # this sleeps it can have it. Without it 11 of 24 runs of one backward ended so.
    atexit.register(time.sleep, 0.2)
    from simgpu import compiled, launches, lines, operators

    lines.install()
    operators.install(Path(os.environ["SIMGPU"]))
    launches.install()
    compiled.install()
