"""Launches of compiled Triton kernels: their PTX is executed, on the memory of the device."""

import ctypes
import functools
import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from simgpu.executor import Compiled, FaultError, UnknownPtxError, run_ptx
from simgpu.executor.launch import built
from simgpu.executor.memory import Region

LAUNCH_FAILED = 719


class Launch(ctypes.Structure):
    """A launch as the driver's stand-in hands it over (SimLaunch in native/sim.h)."""

    _fields_ = [
        ("ptx", ctypes.c_char_p), ("name", ctypes.c_char_p), ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("params", ctypes.POINTER(ctypes.c_void_p)), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


class Weight(ctypes.Structure):
    """Bytes that a launch reads and writes (SimWeight in native/sim.h), without its products."""

    _fields_ = [(name, ctypes.c_double) for name in ("read", "written", "multiply_adds")]


READS, WRITES, COVERS = range(3)
"""The kinds of access, as SimAccess in native/sim.h numbers them."""
MOST_RANGES = 256
"""The most ranges that are told of one argument; what lies beyond them is not checked."""
SIZES = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
launched: Counter[str] = Counter()
"""How often each kernel was launched in this process."""
_names: dict[bytes, bytes] = {}
"""Names of kernels: the stand-ins keep pointers to them."""
_one_at_a_time = threading.RLock()
_cuda: Any = None
_callbacks: list[Any] = []
_numbers = itertools.count()
_kept: dict[int, Callable[[int | None], int]] = {}
"""Work that graphs do with each launch, by the numbers that the stand-ins know it by."""


def install() -> None:
    """Makes the driver's stand-in call `_launch`."""
    global _cuda
    _cuda = ctypes.CDLL("libcuda.so.1")
    _cuda.simgpu_owner.argtypes = [ctypes.c_void_p]
    _cuda.simgpu_host.argtypes, _cuda.simgpu_host.restype = [ctypes.c_void_p], ctypes.c_void_p
    size = ctypes.POINTER(ctypes.c_size_t)
    _cuda.simgpu_block.argtypes = [ctypes.c_void_p, size, size]
    _cuda.simgpu_capture.argtypes, _cuda.simgpu_capture.restype = [ctypes.c_void_p], ctypes.c_size_t
    _cuda.simgpu_keep_python.argtypes = [ctypes.c_void_p, ctypes.c_int]
    _cuda.simgpu_weigh.argtypes, _cuda.simgpu_weigh.restype = [Weight], None
    _cuda.simgpu_work.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))(_launch)
    again = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(
        lambda number, stream: _kept[number](stream)
    )
    _callbacks.extend((run, again))
    _cuda.simgpu_set_python(run, again)


def keep_if_captured(stream: int | None, name: str, work: Callable[[int | None], int]) -> None:
    """Lets the graph that a stream is captured for, if any, do `work` with each of its launches.

    Args:
        stream: its handle.
        name: what a fault is said to be of.
        work: function of a stream, which returns an error code. It is kept for good.
    """
    if _cuda.simgpu_capture(stream):
        number = next(_numbers)
        _kept[number] = lambda stream: _guarded(name, work, stream)
        _cuda.simgpu_keep_python(stream, number)


def _guarded(name: str, work: Callable[[int | None], int], stream: int | None) -> int:
    """Returns what `work` does; an error becomes the code of a failed launch, and is printed."""
    try:
        return work(stream)
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        if not isinstance(error, FaultError | UnknownPtxError):
            what = traceback.format_exc()
        print(f"simgpu: kernel {name} failed: {what}", file=sys.stderr, flush=True)
        return LAUNCH_FAILED


def _launch(pointer: Any) -> int:
    """Runs one launch."""
    launch, name = pointer.contents, pointer.contents.name.decode()
    launched[name] += 1
    return _guarded(name, lambda stream: _run(launch, stream), launch.stream)


def _run(launch: Launch, stream: int | None) -> int:
    if launch.block[1] != 1 or launch.block[2] != 1 or launch.block[0] % 32:
        raise NotImplementedError(f"thread blocks of {list(launch.block)} are not executed")
    compiled = Compiled(launch.ptx.decode(), launch.block[0] // 32, launch.shared)
    params = built(compiled.ptx).program.params
    given = [
        SIZES[dtype.itemsize].from_address(at).value
        for at, (_, dtype) in zip(launch.params[: len(params)], params, strict=True)
    ]
    name = _names.setdefault(launch.name, launch.name)
    work = functools.partial(_execute, name, compiled, list(launch.grid), given)
    code = work(stream)
    keep_if_captured(stream, name.decode(), work)
    return code


def _execute(
    name: bytes, compiled: Compiled, grid: list[int], given: list[int], stream: int | None
) -> int:
    values, regions, starts = [], [], []
    for value, (param, dtype) in zip(given, built(compiled.ptx).program.params, strict=True):
        if dtype.itemsize == 8 and _cuda.simgpu_owner(value) >= 0:
            base, size = ctypes.c_size_t(), ctypes.c_size_t()
            if not _cuda.simgpu_block(value, ctypes.byref(base), ctypes.byref(size)):
                raise FaultError(f"{param} points to memory that was freed or never allocated")
            at = _cuda.simgpu_host(base.value)
            regions.append(Region(param, at, (size.value,), (1,), 1, (at, size.value)))
            starts.append(base.value)
            value = _cuda.simgpu_host(value)
        values.append(value)
    with _one_at_a_time:
        memory = run_ptx(compiled, grid, values, regions=regions)
    bases = {region.storage[0]: base for region, base in zip(regions, starts)}
    used, read, written = [], 0, 0
    for s in memory.segments:
        atomic = np.uint16(0) if s.atomic is None else s.atomic  # which both reads and writes
        writes = s.writer | atomic
        read += int(np.count_nonzero(s.reader | atomic)) * memory.unit
        written += int(np.count_nonzero(writes)) * memory.unit
        for marks, access in ((s.reader, READS), (writes, WRITES)):
            ranges = _ranges(s, marks, memory.unit, access)
            used += [(bases[s.base] + at, size, kind) for at, size, kind in ranges]
    _cuda.simgpu_weigh(Weight(read, written, 0))
    told = np.array(used, np.uint64)
    return _cuda.simgpu_work(stream, name, told.ctypes.data, len(used))


def _ranges(segment: Any, marks: Any, unit: int, access: int) -> Iterator[tuple[int, int, int]]:
    """The marked units of a storage, as ranges (first byte, bytes, access)."""
    touched = np.flatnonzero(marks)
    if not len(touched):
        return
    holes = np.flatnonzero(np.diff(touched) > 1)
    first, last = touched[[0, *(holes + 1)]], touched[[*holes, -1]] + 1
    for begin, end in zip(first[:MOST_RANGES].tolist(), last[:MOST_RANGES].tolist()):
        yield begin * unit, min(end * unit, segment.bytes) - begin * unit, access
    if access == WRITES and len(first) > MOST_RANGES:
        yield 0, segment.bytes, COVERS
